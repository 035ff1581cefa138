"""gRPC server interceptors: `grpc.server(…, interceptors=[RateLimitInterceptor("limitkeeper.yaml")])`, and one for `grpc.aio`.

A call is a request of method POST whose path is "/package.Service/Method" and whose headers are its metadata. A refused call ends
with RESOURCE_EXHAUSTED (UNAVAILABLE where the service is at fault) and its exact retry delay; its message is not deserialised and
its handler not called.
"""

from __future__ import annotations

from ...errors import ConfigurationError

try:
    from .call import GrpcRequestContext, current
    from .concurrency import AsyncConcurrencyInterceptor, ConcurrencyInterceptor
    from .interceptors import AsyncRateLimitInterceptor, RateLimitInterceptor
except ModuleNotFoundError as error:
    raise ConfigurationError(f"gRPC needs {error.name}, which is not installed: pip install 'limitkeeper[grpc]'") from error

__all__ = [
    "AsyncConcurrencyInterceptor",
    "AsyncRateLimitInterceptor",
    "ConcurrencyInterceptor",
    "GrpcRequestContext",
    "RateLimitInterceptor",
    "current",
]
