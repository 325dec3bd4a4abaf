"""The optimizer step: its chunks and the bytes they move."""
