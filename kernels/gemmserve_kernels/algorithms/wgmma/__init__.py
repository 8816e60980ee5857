"""Hopper's kernel on planes: TMA, warp groups, clusters."""
