"""Redis and Valkey: one truth for many machines, decided by one script call."""

from .store import RedisStore

__all__ = ["RedisStore"]
