"""Resumable uploads: which bytes are there, and what may follow."""
