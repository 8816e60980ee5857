"""The CUDA and ROCm backend of a worker: copies through pinned memory, batches, values of programs."""
