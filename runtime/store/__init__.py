"""The store, which owns the memory, the file and the threads of one model, and what it holds of each tier."""
