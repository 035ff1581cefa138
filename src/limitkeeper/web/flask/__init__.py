"""Flask extension: puts a policy in front of an application, and limits single views."""

from .extension import RateLimit
from .refusal import RefusalException

__all__ = ["RateLimit", "RefusalException"]
