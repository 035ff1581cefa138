"""The demo and the pictures are scripts outside the package: puts their folders on the path, as running them does."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in ("examples", "docs/pictures"):
    sys.path.insert(0, str(ROOT / folder))
