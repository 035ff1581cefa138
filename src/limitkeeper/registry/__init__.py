"""Named limiters, each created once from shared, named configurations, over one store."""

from .entries import Change, Entries
from .limiters import Registry

__all__ = ["Change", "Entries", "Registry"]
