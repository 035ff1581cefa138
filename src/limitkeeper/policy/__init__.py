"""Policies: who is limited by what, in a file or in Python, and the gate that enforces one."""

from .facts import Facts, WrittenFacts
from .gate import Gate
from .model import Policy
from .passage import Passage, Refusal
from .reading.mistakes import Mistake, PolicyError

__all__ = ["Facts", "Gate", "Mistake", "Passage", "Policy", "PolicyError", "Refusal", "WrittenFacts"]
