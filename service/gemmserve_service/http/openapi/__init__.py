"""The OpenAPI document."""
