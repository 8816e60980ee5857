"""Extents: files and shared memory that hold arrays, their space and their pages."""
