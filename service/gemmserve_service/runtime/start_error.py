"""Errors of a server's start. A module of its own: the supervisor, which starts it, loads as little as it can."""

from __future__ import annotations


class StartError(RuntimeError):
    """The server cannot start; the message says what to do."""


class UsageError(StartError):
    """The settings ask for what is refused, whatever the state of the machine."""
