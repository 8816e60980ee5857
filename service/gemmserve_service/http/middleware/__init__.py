"""ASGI middleware: access, audit, hosts, rates and lengths of bodies, digests, metrics of requests."""
