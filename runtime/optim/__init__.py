"""The streamed optimizer step."""
