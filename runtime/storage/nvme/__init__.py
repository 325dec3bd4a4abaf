"""The store file: an engine that reads and writes it, and its layout."""
