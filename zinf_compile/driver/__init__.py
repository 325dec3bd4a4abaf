"""Sessions, captured programs, their planning and the search for tiles."""
