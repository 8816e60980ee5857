"""The process's surroundings: clocks, identifiers, logs, background tasks, descriptors, sockets."""
