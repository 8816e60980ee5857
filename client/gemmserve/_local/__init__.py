"""Servers on this machine: their addresses, and arrays in shared memory."""
