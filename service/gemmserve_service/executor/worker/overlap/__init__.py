"""Several tasks at once on a device whose products have stages: copies of one hide beneath the kernels of another."""
