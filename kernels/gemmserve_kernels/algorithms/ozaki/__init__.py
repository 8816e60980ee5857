"""Ozaki scheme II: products by residues on INT8 tensor cores."""
