"""AMD's compiler on a machine without AMD hardware, and what it says of our kernels.

`PYTHONPATH=tools python -m amd`, or `make amd`.
"""
