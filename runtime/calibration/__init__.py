"""This machine: its resources, and its measured rates."""
