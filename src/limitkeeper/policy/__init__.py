"""Policies: who is limited by what, in a file or in Python, and the gate that enforces one."""

from .evaluation import Evaluation
from .gate import Gate
from .model import Policy
from .reading.diagnostics import Diagnostic, PolicyError
from .refusal import Refusal
from .request_context import RequestContext, WrittenRequest

__all__ = ["Diagnostic", "Evaluation", "Gate", "Policy", "PolicyError", "Refusal", "RequestContext", "WrittenRequest"]
