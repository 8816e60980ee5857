"""Small products: problems prepared once, run in bundles beside the queue."""
