"""Large products on their way through the scheduler: their blocks as tasks, and which device computes them."""
