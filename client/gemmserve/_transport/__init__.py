"""Transport: connections to the server, blocking and awaited, with keys, retries, digests and content coding."""
