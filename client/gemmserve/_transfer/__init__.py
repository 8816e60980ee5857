"""Transfers of arrays: bodies, receivers, parts, progress; no I/O."""
