"""Stored parameters: their slots, the home tensors that users see, and their gradients."""
