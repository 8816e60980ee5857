"""Tenants: API keys, identities, and the commands that make and revoke keys."""
