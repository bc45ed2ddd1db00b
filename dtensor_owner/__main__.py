"""``python -m dtensor_owner``, which torchrun can start too."""

from __future__ import annotations

import sys

from dtensor_owner.cli import main

if __name__ == "__main__":
    sys.exit(main())
