"""A store over several stores, with each key on one of them."""

from .store import ShardedStore

__all__ = ["ShardedStore"]
