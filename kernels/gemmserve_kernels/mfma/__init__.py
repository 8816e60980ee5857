"""Matrix units of AMD's CDNA devices (MFMA)."""
