"""Batches: many products in one request."""
