"""Devices: their properties, the compiler, kernel launches and recorded programs."""
