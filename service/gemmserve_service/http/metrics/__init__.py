"""Metrics in Prometheus' form and the counters they are made of."""
