"""A store that answers in time, whatever happens behind it."""

from .store import GuardedStore

__all__ = ["GuardedStore"]
