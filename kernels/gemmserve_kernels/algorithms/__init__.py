"""Algorithms: one package for each way to compute a product or a reduction."""
