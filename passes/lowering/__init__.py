"""Graph and Plan to graph: edits until the graph says what the plan says. Decides nothing."""
