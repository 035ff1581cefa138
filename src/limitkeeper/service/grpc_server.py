"""gRPC transport of the Envoy rate limit service, on grpcio's asyncio server, with the standard health service.

grpcio binds its own sockets, so the port is shared by SO_REUSEPORT: the parent keeps it with a socket that does not listen, and
each worker listens on it. Only message and metadata sizes and idle time are bounded; grpcio has no limit on connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from ..errors import LimitkeeperError, StoreError
from ..policy.file_watcher import FileWatcher
from .access import CHECK, Access, bearer
from .app import Application, RequestError
from .envoy import EnvoyTranslator
from .envoy_config import Domain, config_files, load_domains
from .envoy_messages import DecodeError, HealthCheckRequest, HealthCheckResponse, RateLimitRequest
from .settings import Address, Settings

log = logging.getLogger("limitkeeper")

SERVICE, HEALTH = "envoy.service.ratelimit.v3.RateLimitService", "grpc.health.v1.Health"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


class GrpcListener:
    """The gRPC port of one worker. `domains` are the limits until the file has been read again."""

    def __init__(self, app: Application, settings: Settings, domains: Mapping[str, Domain]) -> None:
        self.settings, self._path = settings, settings.envoy or ""
        self._access = Access(settings)
        self._app, self._translator = app, EnvoyTranslator(app, domains)
        self._watcher: FileWatcher | None = None
        self._stopping = asyncio.Event()

    async def start(self, bound: socket.socket, tls: ssl.SSLContext | None) -> None:
        settings, place = self.settings, str(Address(*bound.getsockname()[:2]))
        options = {
            "grpc.so_reuseport": 1,
            "grpc.max_receive_message_length": settings.max_body,
            "grpc.max_metadata_size": settings.max_headers,
            "grpc.max_connection_idle_ms": round(settings.idle_timeout * 1000),
        }
        self._server = grpc.aio.server(options=list(options.items()))
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        services = {
            SERVICE: {"ShouldRateLimit": unary(self._should_rate_limit)},
            HEALTH: {"Check": unary(self._check), "Watch": stream(self._watch)},
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(*one) for one in services.items()])
        if tls is None:
            self._server.add_insecure_port(place)
        else:
            self._server.add_secure_port(place, credentials(settings))
        await self._server.start()
        try:
            self._reload()  # a worker that takes the place of another begins with the file as it is now
        except LimitkeeperError as error:
            self._refuse_reload(error)
        if settings.watch:
            path, more = self._path, lambda: config_files(self._path)
            self._watcher = FileWatcher(path, self._reload, on_error=self._refuse_reload, more=more, hang_up=True)

    def stop_accepting(self) -> None:
        self._stopping.set()

    async def drain(self, timeout: float) -> None:
        """Answers the calls that have begun; after `timeout` seconds cancels the rest."""
        if self._watcher is not None:
            self._watcher.stop()
        await self._server.stop(timeout)

    def _reload(self) -> None:
        self._translator.replace(load_domains(self._path))

    def _refuse_reload(self, error: Exception) -> None:
        log.error("the Envoy limits of %s stay in force; the new version has errors:\n%s", self._path, error)

    # Calls -----------------------------------------------------------------------------------------------------

    async def _should_rate_limit(self, data: bytes, context: Any) -> bytes:
        if not self._may_check(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "expected the service's token: authorization: Bearer …")
        try:
            known = self._translator.answer_known(data)
            if known is not None:
                return known
            plan = self._translator.should_rate_limit(RateLimitRequest.FromString(data), data)
            found = self._app.perform(plan, lambda response: response.SerializeToString())
            return found if isinstance(found, bytes) else await found
        except (DecodeError, RequestError) as error:
            code, message = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except StoreError:
            code, message = grpc.StatusCode.UNAVAILABLE, "the store could not be asked; try again later"
        except Exception:
            log.exception("a call failed")
            code, message = grpc.StatusCode.INTERNAL, "the service failed to answer this call"
        return await context.abort(code, message)  # type: ignore[no-any-return]  # it raises

    def _may_check(self, context: Any) -> bool:
        """Whether the call has a token that may check all limits."""
        given = [
            (b"authorization", value.encode()) for name, value in context.invocation_metadata() or () if name == "authorization"
        ]
        token = self._access.find(bearer(given) if len(given) == 1 else None)
        return token is not None and CHECK in token.scopes and not token.limits

    def _status(self, data: bytes) -> int:
        if HealthCheckRequest.FromString(data).service not in ("", SERVICE):
            return SERVICE_UNKNOWN
        return NOT_SERVING if self._stopping.is_set() else SERVING

    async def _check(self, data: bytes, context: Any) -> bytes:
        status = self._status(data)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service; this port has {SERVICE}")
        return HealthCheckResponse(status=status).SerializeToString()  # type: ignore[no-any-return]

    async def _watch(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        yield HealthCheckResponse(status=self._status(data)).SerializeToString()
        await self._stopping.wait()
        yield HealthCheckResponse(status=self._status(data)).SerializeToString()


def credentials(settings: Settings) -> Any:
    key, chain = (Path(one or "").read_bytes() for one in (settings.tls_key, settings.tls_cert))
    clients = None if settings.tls_client_ca is None else Path(settings.tls_client_ca).read_bytes()
    return grpc.ssl_server_credentials([(key, chain)], clients, clients is not None)
