"""Capture of a model that is not in memory, over fake tensors."""
