"""Checks of results: Freivalds' with random signs, and a few elements computed again, where the arrays are."""

from gemmserve_kernels.freivalds.check import freivalds_check
from gemmserve_kernels.freivalds.finding import Element, Finding, rounding

__all__ = ["Element", "Finding", "freivalds_check", "rounding"]
