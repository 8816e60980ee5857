"""`python -m gemmserve`: the command line."""

import sys

from gemmserve.cli import main

sys.exit(main())
