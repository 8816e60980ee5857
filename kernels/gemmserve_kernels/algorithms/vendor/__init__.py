"""The vendor's BLAS."""
