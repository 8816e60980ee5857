"""Pending results: when they are written, which go first, and how lost ones are computed again."""
