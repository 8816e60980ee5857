"""A worker's memory: mapped extents, resident copies, results that are not yet in the store."""
