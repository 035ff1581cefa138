"""Events, counters and their sinks: Prometheus, OpenTelemetry, sampled logs, alert rules and a dashboard."""

from .events import Event, Publisher
from .snapshot import Offender, Snapshot

__all__ = ["Event", "Offender", "Publisher", "Snapshot"]
