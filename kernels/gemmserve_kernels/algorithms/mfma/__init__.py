"""AMD's matrix units: MFMA of CDNA devices, WMMA of RDNA 3."""
