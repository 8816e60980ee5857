"""Faults under load against the real server: `make chaos`, and in a small dose the suite (tests/e2e/test_chaos.py)."""
