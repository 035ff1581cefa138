"""Django: a middleware that applies a policy, decorators that limit single views, and system checks."""

from ...errors import ConfigurationError

try:
    from .middleware import RateLimitMiddleware
    from .settings import gate
    from .view_decorators import exempt, limit
except ModuleNotFoundError as error:
    raise ConfigurationError(f"limitkeeper.web.django needs {error.name}, which is not installed: pip install django") from error

__all__ = ["RateLimitMiddleware", "exempt", "gate", "limit"]
