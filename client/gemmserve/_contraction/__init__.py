"""Contractions of several arrays (`einsum`, `tensordot`): from an equation to the steps of a program. Pure."""
