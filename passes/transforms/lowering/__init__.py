"""Writes a plan into a graph: transfers, waits, arena views, releases."""
