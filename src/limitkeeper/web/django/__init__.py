"""Django behind a policy, and limits of single views: `INSTALLED_APPS` for the checks, `MIDDLEWARE` for the policy."""

from .middleware import RateLimitMiddleware
from .settings import gate
from .views import exempt, limit

__all__ = ["RateLimitMiddleware", "exempt", "gate", "limit"]
