"""Dispatch: the choice of an algorithm, and the public entries that plan and run a call."""
