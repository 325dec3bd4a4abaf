"""Moves bytes: the I/O pool, the link to the device, gathers, offloads and reloads."""
