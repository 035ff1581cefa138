"""`limitkeeper serve`: binds the ports, starts the workers, and ends them gracefully.

    parent    reads settings and policy, binds every port, starts `workers` children, restarts those that die
    worker    one event loop (uvloop when installed): gate, application, listeners; a thread of the gate watches the policy file

With one worker there is no child. Workers share the listening sockets, so connections that wait to be accepted survive the death
of a worker; and they share exact limits: a memory:// store becomes a SharedStore on a file of its own. SIGTERM and SIGINT drain:
nothing new is accepted, begun requests are answered. SIGHUP reloads the policy. The addresses are printed when every worker
serves every port and handles signals: a program that reads them can connect, or send a signal, at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import shlex
import shutil
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, TextIO

from ..algorithms import FixedWindow
from ..algorithms.claim import NamedLimit
from ..clock import SYSTEM, steady_us
from ..errors import ConfigurationError, LimitkeeperError, StoreError
from ..policy.gate import Gate
from ..policy.model import SHADOW, Policy, Tiers
from ..rate import Rate
from ..stores import MemoryStore, Store, store_from_url
from ..stores.urls import masked
from .access import Access
from .app import Application, available
from .connections import Listener
from .settings import Address, Settings

if TYPE_CHECKING:
    from .envoy_config import Domain
    from .grpc_server import GrpcListener

log = logging.getLogger("limitkeeper")

DEFAULT_POLICY = "limitkeeper.yaml"
MEMORY = "memory://"
#: A worker that dies so soon after its start is not restarted at once; after so many in a row the service gives up.
SOON_US, MAX_FAILURES = 1_000_000, 5
#: Descriptors besides those of clients: files, stores, the sockets of workers.
OWN_FILES = 64


def http_listener(app: Application, settings: Settings, folder: str | None) -> Listener:
    from .http import FULL, HttpConnection, Router
    from .scoped import ScopedRouter

    access = Access(settings)
    router = ScopedRouter(app, access) if access.scoped else Router(app, settings.token)
    return Listener(settings, partial(HttpConnection, router), FULL)


def resp_listener(app: Application, settings: Settings, folder: str | None) -> Listener:
    from .resp import FULL, Commands
    from .scoped import ScopedCommands
    from .store_commands import StoreCommands

    access = Access(settings)
    commands = ScopedCommands(app, access) if access.scoped else Commands(app, settings.token)
    StoreCommands(app, settings).add_to(commands)
    return Listener(settings, commands.connection, FULL)


def grpc_listener(app: Application, settings: Settings, folder: str | None) -> GrpcListener:
    from .grpc_server import GrpcListener

    return GrpcListener(app, settings, load_envoy(settings))


def admin_listener(app: Application, settings: Settings, folder: str | None) -> Listener:
    from .admin import AdminListener

    return AdminListener(app, settings, folder)


#: The transports by the name of their setting. A listener serves a bound socket: `start`, `stop_accepting`, `drain`.
TRANSPORTS: Mapping[str, Callable[[Application, Settings, str | None], Listener | GrpcListener]] = {
    "http": http_listener,
    "resp": resp_listener,
    "grpc": grpc_listener,
    "admin": admin_listener,
}


def serve(settings: Settings, version: str, out: TextIO = sys.stdout) -> int:
    """Runs the service until a signal ends it; returns the exit code."""
    policy = load_policy(settings)
    load_envoy(settings)
    settings = replace(settings, secret=settings.secret or token_bytes(32).hex())
    tls_context(settings)  # errors of certificates are found before anything starts
    check_installed(settings)
    settings = allow_connections(settings)
    sockets = bind_all(settings)
    folder = None
    try:
        if settings.workers > 1:
            folder = tempfile.mkdtemp(prefix="limitkeeper-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        worker = Worker(settings, policy, sockets, folder, version)
        shown = greeting(settings, policy, sockets, version, check_store(store_url(settings, policy)))
        ready = partial(print, shown, file=out, flush=True)
        return worker.run(ready) if settings.workers == 1 else Supervisor(worker, settings.workers).run(ready)
    finally:
        for bound in sockets.values():
            bound.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def allow_connections(settings: Settings) -> Settings:
    """Raises the limit on open files as far as the system allows: many systems begin with 1024. Where that is too few, fewer
    connections are accepted: a port that has all descriptors would take the others down, with health checks and dashboard."""
    try:
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ImportError, ValueError, OSError):
        return settings
    ports = len(settings.listeners()) - (settings.envoy is None and settings.grpc is not None)
    room = max(1, (most - OWN_FILES) // ports)
    if most < 0 or settings.max_connections <= room:  # -1: no limit
        return settings
    if "max_connections" in settings.sources:
        log.warning("max_connections is %d, not %d: this process may open %d files", room, settings.max_connections, most)
    return replace(settings, max_connections=room)


def check_installed(settings: Settings) -> None:
    """ConfigurationError for a package that a transport needs, before anything is bound."""
    try:
        if settings.http is not None or settings.admin is not None:
            from . import http  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"the service needs {error.name}; pip install 'limitkeeper[service]'") from None


def load_policy(settings: Settings) -> Policy:
    """The policy of the settings; without one, an empty policy, over which only CL.THROTTLE has limits."""
    path = settings.policy or (DEFAULT_POLICY if Path(DEFAULT_POLICY).is_file() else None)
    return Policy() if path is None else Policy.load(path)


def load_envoy(settings: Settings) -> dict[str, Domain]:
    """The domains of the Envoy rate limit service; errors are found before anything starts."""
    if settings.envoy is None:
        return {}
    if settings.grpc is None or find_spec("grpc") is None or find_spec("google.protobuf") is None:
        remedy = "set --grpc HOST:PORT" if settings.grpc is None else "pip install 'limitkeeper[grpc]'"
        raise ConfigurationError(f"envoy: the Envoy rate limit service needs gRPC; {remedy}")
    return first_domains(settings.envoy)


@lru_cache(1)  # workers inherit what the parent has read: they start also when the file has errors by then
def first_domains(path: str) -> dict[str, Domain]:
    from .envoy_config import load_domains

    return load_domains(path)


def store_url(settings: Settings, policy: Policy) -> str:
    return settings.store or policy.store


def open_store(settings: Settings, folder: str | None, url: str) -> Store:
    """The store of a URL, in a worker: several workers share one for memory://, also where a reload names it."""
    if folder is not None and url.startswith(MEMORY):
        from ..stores.shared import SharedStore

        path = Path(folder, "limits")
        return SharedStore(path, settings.max_keys) if "max_keys" in settings.sources else SharedStore(path)
    return MemoryStore(settings.max_keys) if url == MEMORY else store_from_url(url)


def check_store_url(url: str) -> None:
    """ConfigurationError for a URL that names no store. A shared file is not made, only its folder is looked for."""
    path = url.removeprefix("shared://").partition("?")[0]
    if path == url.partition("?")[0]:
        store_from_url(url).close()
    elif not os.access(Path(path).parent, os.W_OK):
        raise ConfigurationError(f"store: {url!r}: there is no folder {str(Path(path).parent)!r} that can be written to")


def check_store(url: str) -> bool:
    """Opens the store once, so that its mistakes are found before a worker starts. A remote one that does not answer is only
    warned of: the service starts all the same."""
    store = store_from_url(url)
    try:
        named = NamedLimit("service", "start", FixedWindow(Rate(1, 1_000_000)))
        if not store.local:
            available(store.decide_one(named, "start", 1, 0, False))
    except StoreError as error:
        holds = "until it can, on_failure of each rule decides, and its default, open, admits everything"
        log.warning("the store %s can't be reached; %s: %s", masked(url), holds, error)
        return False
    finally:
        store.close()
    return True


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(one for one in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if one)
        raise ConfigurationError(f"tls: can't load {files}: {error}; expected PEM files, the key without a passphrase") from None
    return context


def bind_all(settings: Settings) -> dict[str, socket.socket]:
    found: dict[str, socket.socket] = {}
    try:
        for name, address in settings.listeners().items():
            if name == "grpc" and settings.envoy is not None:
                bind(name, address).close()  # finds out whether the port is free
                found[name] = bind(name, address, listen=False)
            elif name == "admin" and name not in settings.sources:
                found[name] = bind_default(name, address)
            elif name in TRANSPORTS and name != "grpc":
                found[name] = bind(name, address)
    except ConfigurationError:
        for bound in found.values():
            bound.close()
        raise
    return found


def bind_default(name: str, address: Address) -> socket.socket:
    """Binds a default address that was not configured: where another service has it, any free port will do."""
    try:
        return bind(name, address)
    except ConfigurationError:
        return bind(name, Address(address.host, 0))


def bind(name: str, address: Address, listen: bool = True) -> socket.socket:
    """A bound socket; `listen` False: it keeps the port for sockets that others bind with SO_REUSEPORT."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)[0]
        bound = socket.socket(family, kind, protocol)  # with the protocol's number: otherwise asyncio leaves Nagle's delay on
    except OSError as error:
        raise ConfigurationError(f"{name}: can't resolve {address}: {error}") from None
    try:
        # Two sockets with SO_REUSEADDR may share a port while neither listens: a socket that only keeps a port must not have it.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR if listen else socket.SO_REUSEPORT, 1)
        bound.bind(place)
        if listen:
            bound.listen(1024)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        flag = f"--{name}"
        raise ConfigurationError(f"{name}: can't bind {address}: {error.strerror}; choose another with {flag}") from None
    return bound


class Worker:
    """One process that serves."""

    def __init__(
        self, settings: Settings, policy: Policy, sockets: Mapping[str, socket.socket], folder: str | None, version: str
    ) -> None:
        self.settings, self.policy, self.sockets, self.folder, self.version = settings, policy, sockets, folder, version

    def run(self, ready: Callable[[], object], parent: int | None = None) -> int:
        """Serves until a signal; calls `ready` when every port is served. `parent`: a pipe that ends when the parent has died;
        without it the worker would keep the ports of a service that nothing restarts or stops."""
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(self._serve(ready, parent))
        if parent is not None and select.select([parent], [], [], 0)[0] and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        return 0

    async def _serve(self, ready: Callable[[], object], parent: int | None) -> None:
        settings = self.settings
        secret = (settings.secret or "").encode()
        policy = self._current_policy()
        opens = partial(open_store, settings, self.folder)
        store = None if settings.store is None else opens(settings.store)  # otherwise the gate follows the policy's
        gate = Gate(policy, store=store, secret=secret, open_store=opens)
        try:
            if settings.watch and policy.source is not None:
                gate.watch()
            else:  # the default action of SIGHUP would end the process
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGHUP, loop.run_in_executor, None, reload, gate)
            ttl_us = round(settings.reservation_ttl * 1_000_000)
            app = Application(gate, secret=secret, ttl_us=ttl_us, version=self.version)
            await self._listen(app, ready, parent)
        finally:
            await gate.aclose()
            if store is not None:
                await store.aclose()

    def _current_policy(self) -> Policy:
        """The policy as its file is now, for a worker that takes the place of another; a file with errors changes nothing."""
        try:
            return self.policy if self.policy.source is None else Policy.load(self.policy.source)
        except LimitkeeperError as error:
            log.error("the policy %r stays in force; its new version has errors:\n%s", self.policy.name, error)
            return self.policy

    async def _listen(self, app: Application, ready: Callable[[], object], parent: int | None) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        listeners = [TRANSPORTS[name](app, self.settings, self.folder) for name in self.sockets]
        tls = tls_context(self.settings)
        for listener, bound in zip(listeners, self.sockets.values(), strict=True):
            await listener.start(bound, tls)
        if parent is not None:
            loop.add_reader(parent, on_end, loop, parent, stop)
        ready()
        await stop.wait()
        app.draining = True
        for listener in listeners:
            listener.stop_accepting()
        await asyncio.gather(*[listener.drain(self.settings.drain_timeout) for listener in listeners])


def on_end(loop: asyncio.AbstractEventLoop, pipe: int, stop: asyncio.Event) -> None:
    """Stops a worker whose parent has died."""
    log.error("the parent of this worker has died; the worker ends")
    loop.remove_reader(pipe)
    stop.set()


def reload(gate: Gate) -> None:
    """Loads the policy file again; a version with errors is refused. Does nothing without a file."""
    try:
        if gate.policy.source is not None:
            gate.reload(Policy.load(gate.policy.source))
    except Exception as error:
        gate.reload_refused(error)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, when it is installed; otherwise asyncio's own."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class Supervisor:
    """The parent of several workers: forwards signals, and starts another worker for one that died."""

    def __init__(self, worker: Worker, count: int) -> None:
        self._worker, self._count = worker, count
        self._started: dict[int, int] = {}  # process id -> time of its start
        self._stopping = False
        self._failures = 0
        self._alive = os.pipe()  # nothing is written: it ends when no process has its second descriptor

    def run(self, ready: Callable[[], object]) -> int:
        """Runs the workers until a signal; calls `ready` when each of them serves, or has ended."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        pipes = [self._start() for _ in range(self._count)]
        served = [os.read(pipe, 1) for pipe in pipes]
        if any(served) and not self._stopping:
            ready()
        for pipe in pipes:
            os.close(pipe)
        while self._started:
            pid, status = os.wait()
            started = self._started.pop(pid, None)
            if started is not None and not self._stopping:
                self._restart(pid, status, started)
        return 0 if self._failures < MAX_FAILURES else 1

    def _start(self) -> int:
        """Starts a worker; returns a pipe from which a byte can be read when it serves, or the end when it has ended."""
        signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a signal must not meet a child that has the parent's handlers
        pipe, own = os.pipe()
        pid = os.fork()
        if pid:
            os.close(own)
            self._started[pid] = steady_us()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            return pipe
        code = 1
        try:
            for number in signals:
                signal.signal(number, signal.SIG_DFL if number != signal.SIGHUP else signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            os.close(self._alive[1])
            code = self._worker.run(lambda: os.write(own, b"1"), self._alive[0])
        except BaseException:
            log.exception("a worker failed")
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _restart(self, pid: int, status: int, started_us: int) -> None:
        log.error("worker %d ended (%s); another one is started", pid, os.waitstatus_to_exitcode(status))
        self._failures = self._failures + 1 if steady_us() - started_us < SOON_US else 0
        if self._failures >= MAX_FAILURES:
            log.error("%d workers in a row ended within a second of their start; the service stops", self._failures)
            self._on_signal(signal.SIGTERM, None)
            return
        if self._failures:
            SYSTEM.sleep(0.1 * 2**self._failures)
        if not self._stopping:
            os.close(self._start())

    def _on_signal(self, number: int, frame: Any) -> None:
        self._stopping = self._stopping or number != signal.SIGHUP
        if self._stopping:
            for bound in self._worker.sockets.values():
                bound.close()  # otherwise new connections would be accepted here, and never answered
        for pid in list(self._started):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


# What is printed ----------------------------------------------------------------------------------------------------


def greeting(
    settings: Settings, policy: Policy, sockets: Mapping[str, socket.socket], version: str, store_answers: bool = True
) -> str:
    """The addresses, and a command to try if the store answers."""
    scheme = "s" if settings.tls_cert else ""
    urls = {"http": f"http{scheme}://", "resp": f"redis{scheme}://", "grpc": "grpc://", "admin": f"http{scheme}://"}
    places = {name: str(Address(*bound.getsockname()[:2])) for name, bound in sockets.items()}
    limits = f"{len(policy.rules)} limit{'s' * (len(policy.rules) != 1)}"
    workers = f"{settings.workers} worker{'s' * (settings.workers > 1)}"
    lines = [f"limitkeeper {version}: policy {policy.name!r}, {limits}, {workers}"]
    if policy.source is None:
        lines.append(f"no policy file ({DEFAULT_POLICY} not found here): only CL.THROTTLE has limits")
    lines += [f"  {name:<6}{urls.get(name, '')}{place}" for name, place in places.items()]
    command = curl_line(settings, policy, places["http"]) if "http" in places and not scheme and store_answers else ""
    if command:
        lines += ["", "Try it; it prints 200, then 429:", "", command]
    return "\n".join(lines) + "\n"


def curl_line(settings: Settings, policy: Policy, place: str) -> str:
    """A command that hits the first limit twice, each time with all that it holds; "" when the policy has no such limit."""
    for rule in policy.rules:
        limits = rule.limit.otherwise if isinstance(rule.limit, Tiers) else rule.limit
        if limits and rule.on_refusal.action != SHADOW and all(type(limit).kind != "leaky bucket queue" for limit in limits):
            cost = min(limit.capacity for limit in limits)
            body = shlex.quote(f'{{"limit": "{rule.name}", "key": "demo", "cost": {cost}}}')
            token = ' -H "Authorization: Bearer $LIMITKEEPER_TOKEN"' if settings.token else ""
            return f"curl -s -o /dev/null -w '%{{http_code}}\\n'{token} -d {body} 'http://{place}/v1/check?[1-2]'"
    return ""
