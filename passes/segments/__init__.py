"""SEGMENT: compute between our ops becomes a few pieces for each block, to be compiled once for each distinct structure."""
