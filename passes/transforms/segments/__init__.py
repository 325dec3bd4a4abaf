"""Replaces what one block computes by one compiled op."""
