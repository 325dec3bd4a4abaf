"""A model's weights on the way in and out: its first values, and their export."""
