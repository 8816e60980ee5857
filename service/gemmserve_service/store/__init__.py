"""Arrays: uploads, the catalogue, pins, quotas, expiry, recovery after a restart."""
