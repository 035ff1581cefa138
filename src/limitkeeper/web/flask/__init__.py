"""Flask behind a policy, and limits of single views."""

from .extension import RateLimit
from .refused import Refused

__all__ = ["RateLimit", "Refused"]
