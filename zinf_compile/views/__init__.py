"""Pictures of a plan: the Chrome trace, the arena chart, what differs between two plans."""
