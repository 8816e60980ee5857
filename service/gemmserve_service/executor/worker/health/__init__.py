"""Health of a worker's device: what its driver's sensors say, read in a thread beside the work."""
