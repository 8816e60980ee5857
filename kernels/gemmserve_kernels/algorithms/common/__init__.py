"""Host code that several algorithms share."""
