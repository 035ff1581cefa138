"""How hard the laws are tried: some hundred examples each in every run, twenty times as many in a soak (LIMITKEEPER_SOAK=1)."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = 20 if os.environ.get("LIMITKEEPER_SOAK") == "1" else 1


def effort(examples: int) -> Any:
    """Settings for a law that is tried on so many examples."""
    return settings(max_examples=examples * TIMES, deadline=None, suppress_health_check=list(HealthCheck))
