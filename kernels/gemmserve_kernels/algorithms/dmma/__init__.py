"""Double precision on tensor cores (sm_80 and later): what no residues serve."""
