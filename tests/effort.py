"""How many examples a property is tried on: LIMITKEEPER_EFFORT times the number that the test names; 20 times in a soak.

`make test` sets 0.05, `make test-all` 0.3.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = 20.0 if os.environ.get("LIMITKEEPER_SOAK") == "1" else float(os.environ.get("LIMITKEEPER_EFFORT", "1"))


def effort(examples: int, least: int = 5) -> Any:
    """Settings for a property that is tried on so many examples."""
    return settings(max_examples=scaled(examples, least), deadline=None, suppress_health_check=list(HealthCheck))


def scaled(examples: int, least: int = 2) -> int:
    return max(least, round(examples * TIMES))
