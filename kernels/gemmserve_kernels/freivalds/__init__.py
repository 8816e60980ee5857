"""Is a product right? Freivalds' check with random signs, on the device where the arrays are, or with NumPy."""

from gemmserve_kernels.freivalds.check import freivalds_check
from gemmserve_kernels.freivalds.finding import Finding, rounding

__all__ = ["Finding", "freivalds_check", "rounding"]
