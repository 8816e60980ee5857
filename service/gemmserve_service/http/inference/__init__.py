"""The Open Inference Protocol (version 2) over HTTP: gemm and gemm_reduce as its models, for clients that speak it."""
