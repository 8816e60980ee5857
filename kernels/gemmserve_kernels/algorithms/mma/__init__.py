"""Tensor cores since Ampere by mma.sync."""
