"""Cells, as HTTP shows them: what is sent on to another one, what clients are told, what cells ask each other."""
