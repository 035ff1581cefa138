"""A limit shared by the processes of a host: a mapped file, and nobody else."""

from .store import SharedStore

__all__ = ["SharedStore"]
