"""Process-level concerns: signals, forks, waiting, threads, memory."""
