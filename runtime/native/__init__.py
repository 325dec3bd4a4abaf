"""C++ of ours, compiled once at first use."""
