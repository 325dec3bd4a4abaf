"""Estimated seconds of ops."""
