"""`python -m amd`: see `amd.check`."""

from __future__ import annotations

import sys

from amd.check import main

if __name__ == "__main__":
    sys.exit(main())
