"""Request bodies: streams, multipart forms, JSON, shared memory and descriptors, as arrays and parameters."""
