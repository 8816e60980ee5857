"""Extents: files and shared memory that hold arrays, their space and their pages.

`space` has the storage tiers: it chooses where an array's bytes lie, files or memory, and a further tier goes there.
"""
