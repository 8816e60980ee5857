"""Batches of small products."""
