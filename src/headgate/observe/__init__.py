"""What happened: events, and those who listen."""

from .events import Event, Publisher

__all__ = ["Event", "Publisher"]
