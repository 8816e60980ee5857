"""Forms of jobs: what those have in common that differ by their operands alone, worked out once for all of them."""
