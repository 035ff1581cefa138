"""Named limiters with shared, named configurations."""

from .changes import Change
from .entries import Entries
from .limiters import Registry

__all__ = ["Change", "Entries", "Registry"]
