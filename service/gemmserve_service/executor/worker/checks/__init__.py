"""Checks of what a device computes: the product of its start, results that are to be verified, counted elements."""
