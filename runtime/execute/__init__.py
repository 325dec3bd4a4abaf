"""Runs lowered graphs: the executor, op bodies, compiled segments, autograd leaves."""
