"""Edits of the joint graph of forward and backward."""
