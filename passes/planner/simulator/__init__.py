"""A plan played through: what is busy when, and what the step waits for."""
