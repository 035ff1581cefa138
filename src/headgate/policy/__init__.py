"""Policies: who is limited by what, in a file or in Python, and the gate that enforces one."""

from .facts import Facts, WrittenFacts
from .model import Policy

__all__ = ["Facts", "Policy", "WrittenFacts"]
