"""Named limiters with shared, named configurations."""

from .entries import Change, Entries
from .limiters import Registry

__all__ = ["Change", "Entries", "Registry"]
