"""Replaces plain parameter inputs by gathers."""
