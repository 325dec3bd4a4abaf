"""Pictures of a plan: the Chrome trace."""
