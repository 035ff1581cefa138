"""A limit shared by the processes of a host: a mapped file, without a server."""

from .store import SharedStore

__all__ = ["SharedStore"]
