"""Memory and files: the arena, staging, host memory, the store file, checkpoints' files."""
