"""Flask behind a policy, and limits of single views."""

from .extension import RateLimit
from .refusal import RefusalException

__all__ = ["RateLimit", "RefusalException"]
