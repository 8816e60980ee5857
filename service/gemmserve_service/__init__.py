"""The service: matrix products of a device behind HTTP. docs/architecture.md draws its rooms."""
