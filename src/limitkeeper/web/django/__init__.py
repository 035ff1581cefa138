"""Django: a middleware that applies a policy, decorators that limit single views, and system checks."""

from .middleware import RateLimitMiddleware
from .settings import gate
from .views import exempt, limit

__all__ = ["RateLimitMiddleware", "exempt", "gate", "limit"]
