"""Hashes of arrays: while they come in, or when nothing else is to be done."""
