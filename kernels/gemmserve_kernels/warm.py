"""Former name of `precompile`: `python -m gemmserve_kernels.warm sm_90a`."""

from __future__ import annotations

from gemmserve_kernels.precompile import main

if __name__ == "__main__":
    raise SystemExit(main())
