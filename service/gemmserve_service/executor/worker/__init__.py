"""The process that owns one device: it maps operands and results, and computes straight from the one into the other."""
