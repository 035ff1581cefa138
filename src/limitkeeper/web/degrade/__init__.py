"""Ready handlers of `on_refusal: degrade NAME`: the cached response, a response later, or a smaller response."""

from .deferred_requests import DeferredRequests
from .reduced_response import is_reduced
from .stale_cache import StaleCache

__all__ = ["DeferredRequests", "StaleCache", "is_reduced"]
