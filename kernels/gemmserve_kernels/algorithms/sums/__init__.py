"""Sums and means of products without the products."""
