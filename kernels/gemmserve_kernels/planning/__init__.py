"""Predictions of products on devices, hosts and nodes: time, memory, transfers, the cut. Pure; no device is needed."""
