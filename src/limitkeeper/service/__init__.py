"""The decision service, `limitkeeper serve`: a policy's limits over HTTP, the Redis protocol and gRPC (Envoy)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import Application, RequestError

__all__ = ["Application", "RequestError"]


def __getattr__(name: str) -> Any:
    """Imported when they are asked for: the command line reads only the table of settings."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import app

    return getattr(app, name)
