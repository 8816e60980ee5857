"""Jobs whose operands are in several cells."""
