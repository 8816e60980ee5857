"""Is a product right? Freivalds' check with random signs and a few elements computed again, on the device where the
arrays are, or with NumPy.
"""

from gemmserve_kernels.freivalds.check import freivalds_check
from gemmserve_kernels.freivalds.finding import Element, Finding, rounding

__all__ = ["Element", "Finding", "freivalds_check", "rounding"]
