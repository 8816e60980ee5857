"""NumPy models of the kernels' arithmetic, step by step: what a kernel must return, bit for bit or within a bound."""
