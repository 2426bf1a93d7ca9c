"""``python -m capvid`` is the ``capvid`` command."""

from __future__ import annotations

import sys

from capvid.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
