"""Portable kernels: single source for CUDA and ROCm, plain FMA."""
