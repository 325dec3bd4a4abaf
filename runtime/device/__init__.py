"""Devices that compute: their memory and their streams."""
