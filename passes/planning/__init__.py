"""Facts to Plan: pure functions of numbers. Imports no torch."""
