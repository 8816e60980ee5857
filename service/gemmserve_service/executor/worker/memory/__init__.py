"""A worker's memory: mapped extents, resident copies, prefetching, results that are not yet in the store."""
