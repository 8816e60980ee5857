"""Connections: the byte protocol under the ASGI application, its limits and timeouts."""
