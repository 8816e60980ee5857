"""Linear algebra on top of the products: Hermitian rank-k products, factorizations, systems, exponentials."""
