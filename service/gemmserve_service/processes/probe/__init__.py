"""Measurements of this host that predictions are made from (`gemmserve_kernels.planning`), in bounded time."""
