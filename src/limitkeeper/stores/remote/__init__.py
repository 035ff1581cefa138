"""A limitkeeper service as a store."""

from .store import RemoteStore

__all__ = ["RemoteStore"]
