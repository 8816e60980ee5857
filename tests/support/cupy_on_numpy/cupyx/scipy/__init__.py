"""SciPy's names in CuPy."""
