"""Numerics: references and error metrics, and models of the matrix units' arithmetic."""
