"""What happened, and how often: events, tallies, and those who read them (Prometheus, OpenTelemetry, logs)."""

from .events import Event, Publisher
from .snapshot import Offender, Snapshot

__all__ = ["Event", "Offender", "Publisher", "Snapshot"]
