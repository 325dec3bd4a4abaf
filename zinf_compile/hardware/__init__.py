"""What machines can do: profiles, rates, and the world of ranks. No torch."""
