"""Searches for the best plan, builds it, and verifies it."""
