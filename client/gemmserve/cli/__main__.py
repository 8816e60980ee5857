"""`python -m gemmserve.cli`."""

import sys

from gemmserve.cli import main

sys.exit(main())
