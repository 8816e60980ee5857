"""HTTP/1.1 on sockets, under the ASGI application: one protocol class, with its limits, parser and body receiver."""
