"""Ops and parameters cut into tiles, before autograd."""
