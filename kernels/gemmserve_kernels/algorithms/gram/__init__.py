"""Sums of squares of a product's rows or columns from a Gram matrix."""
