"""LeasedStore: fetches batches of tokens from another store and spends them from memory."""

from .store import LeasedStore

__all__ = ["LeasedStore"]
