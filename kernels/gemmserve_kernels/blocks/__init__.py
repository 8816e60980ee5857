"""Products cut into canonical blocks: which there are, in which order, what a memory holds meanwhile. Pure."""
