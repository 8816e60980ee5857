"""Executors run planned products on devices: `local` in worker processes, `inline` in a thread of this one."""
