"""Measurements: our products beside a rival's in the same run, with time, rates and errors."""
