"""The wholesaler: batches taken from another store, handed out from memory."""

from .store import LeasedStore

__all__ = ["LeasedStore"]
