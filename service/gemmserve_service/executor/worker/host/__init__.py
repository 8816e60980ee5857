"""The host backend's parts: BLAS threads, repeated forms, values of programs."""
