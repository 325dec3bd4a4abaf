"""Which single ops, and chains of them, may be split into tiles, and the edits that do it. Nothing is decided here."""
