"""NumPy on the host."""
