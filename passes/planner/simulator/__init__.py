"""Simulates plans: which lane is busy when, and what the step waits for."""
