"""What a simulated step is made of, and what can be read off it."""
