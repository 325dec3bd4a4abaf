"""Graph to graph before autograd: what a captured model needs before AOTAutograd sees it."""
