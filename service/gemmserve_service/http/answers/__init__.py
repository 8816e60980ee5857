"""Answers sent in pieces: arrays, archives, content codings."""
