"""Programs: steps recorded in a `with` block, which run as one job when it ends."""
