"""Processes of the server and its commands: supervisor, front, listeners, `serve`, `doctor`, health check."""
