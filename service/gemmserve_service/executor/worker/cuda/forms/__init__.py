"""Products of one form on a device: what does not depend on their arrays is worked out once."""
