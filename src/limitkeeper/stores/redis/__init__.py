"""RedisStore: state in Redis or Valkey, shared by many machines, decided by one script call."""

from .store import RedisStore

__all__ = ["RedisStore"]
