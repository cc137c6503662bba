"""``python -m hstransport_consumer``: hstransport-consumer."""

import sys

from .cli import main

sys.exit(main())
