"""Tier below the store: cold arrays as objects of a bucket or of a folder elsewhere."""
