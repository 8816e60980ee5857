"""Calls: parameters, one request a route, and flows of several exchanges; no I/O."""
