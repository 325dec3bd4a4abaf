"""Weights of a model: first values, and export."""
