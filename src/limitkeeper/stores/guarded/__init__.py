"""A store that answers within a budget, with a circuit breaker and a fallback for when the store behind it fails."""

from .store import GuardedStore

__all__ = ["GuardedStore"]
