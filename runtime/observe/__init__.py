"""What a run did: bytes, seconds, recordings, progress."""
