"""Handles of arrays: views, NumPy's functions on them, how they show themselves, what becomes of the last one."""
