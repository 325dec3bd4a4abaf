"""Checkpoints: a model and its optimizer in a folder, restored bitwise."""
