"""How many examples a law is tried on: LIMITKEEPER_EFFORT times the number that the law names; 20 times in a soak.

`make test` sets 0.4, `make test-all` 1.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = 20.0 if os.environ.get("LIMITKEEPER_SOAK") == "1" else float(os.environ.get("LIMITKEEPER_EFFORT", "1"))


def effort(examples: int) -> Any:
    """Settings for a law that is tried on so many examples."""
    return settings(max_examples=max(10, int(examples * TIMES)), deadline=None, suppress_health_check=list(HealthCheck))
