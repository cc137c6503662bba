"""``python -m hstransport.cli``."""

import sys

from . import main

sys.exit(main())
