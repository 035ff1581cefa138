"""Sticky sharding: each key has its home, and hot ones are leased from there."""

from .store import ShardedStore

__all__ = ["ShardedStore"]
