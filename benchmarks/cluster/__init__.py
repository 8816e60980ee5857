"""Joined workers beside local ones: `python -m benchmarks.cluster`."""
