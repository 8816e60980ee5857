"""Planes of float16 and bfloat16: scaling, splitting, what they serve, products of them, fallback."""
