"""Sends commands and script calls to the right server, and sends again what was certainly not executed.

The plan is the same for every topology: locate the servers, write everything in one go to each, and look at the replies. An error
reply that says that nothing was done, and a connection that failed before anything was sent, allow another attempt, at the server
that the topology then names; what may have been executed is never sent again. `attempts` bounds it, and so does the budget of the
call. A request that found a state of another rate is converted and sent again. `Route` is the topology of a single server;
`sentinel.py` and `cluster.py` are the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ...errors import StoreError, StoreUnavailable
from ..sans_io import Pause, Plan
from .address import Address, Endpoint
from .limit_record import Registries, convert_stale, stale_registries
from .resp import Command, Outcome, Reply, ReplyError, Unsent, error_kind, exchange, unavailable
from .script_request import AnyRequest, decode_call, encode_call

AGAIN, LATER, FAILED = "again", "later", "failed"
#: Seconds between two attempts at something that takes a moment.
PAUSE = 0.01
#: Largest number of requests in one script call: a larger batch would delay the server and the callers behind it.
MAX_REQUESTS = 64
#: The same for requests that must be decided at one moment: some milliseconds of server time.
MAX_REQUESTS_AT_ONCE = 1000
#: How often a state whose rate changes meanwhile is converted.
MAX_CONVERSIONS = 4


class RoutedCommands:
    """Commands for the server that holds `key`; without a key, for any server. Afterwards `replies` or `error` is set."""

    __slots__ = ("_commands", "asking", "endpoint", "error", "key", "replies")

    def __init__(self, commands: Sequence[Command], key: bytes | None = None, endpoint: Endpoint | None = None) -> None:
        self._commands = commands
        self.key = key
        self.endpoint = endpoint
        self.asking = False  # whether a cluster redirected it with ASK
        self.error: StoreError | None = None
        self.replies: list[Reply] = []

    def commands(self) -> list[Command]:
        if not self.asking:
            return list(self._commands)
        return [one for command in self._commands for one in (["ASKING"], command)]

    def decode(self) -> bool:
        """Whether the replies make sense."""
        return True


class ScriptCall(RoutedCommands):
    """Requests that share one script call."""

    __slots__ = ("loads_before", "requests", "script", "send_source")

    def __init__(self, requests: Sequence[AnyRequest]) -> None:
        self.requests = requests
        self.script, keys, body = encode_call(requests)
        super().__init__([["EVALSHA", self.script.sha, b"%d" % len(keys), *keys, body]], keys[0])
        self.send_source = False
        self.loads_before = 0  # how many scripts the route had loaded when this was sent

    def load_script(self) -> None:
        """Sends the source of the script: the server does not have it."""
        self.send_source = True
        self._commands = [["EVAL", self.script.source, *self._commands[0][2:]]]

    def decode(self) -> bool:
        return decode_call(self.requests, self.replies[0])


def script_calls(requests: Sequence[AnyRequest], most: int) -> list[ScriptCall]:
    """Requests for one slot (or a single server), in order, at most so many per call."""
    return [ScriptCall(requests[at : at + most]) for at in range(0, len(requests), most)]


def raise_first(errors: Iterable[StoreError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


class Route:
    """The topology of a single server."""

    attempts = 3

    def __init__(self, address: Address) -> None:
        self.address = address
        self.login = address.login
        self._server = address.endpoints[0]
        #: The one server that holds everything, when there is one and it is known: calls to it need no plan.
        self.direct: Endpoint | None = self._server
        #: Called when a server has lost its data (it was restarted, flushed, or replaced by another).
        self.on_data_loss: Callable[[], None] = _ignore
        self._loaded: dict[tuple[Endpoint | None, bytes], int] = {}  # (server, SHA) of the scripts sent as source -> load number
        self._loads = 0

    # What topologies differ in -------------------------------------------------------------------------------------------

    def script_calls(self, requests: Sequence[AnyRequest], most: int) -> list[ScriptCall]:
        return script_calls(requests, most)

    def locate(self, some: Sequence[RoutedCommands]) -> Plan[None]:
        """Sets the endpoint of each."""
        for commands in some:
            commands.endpoint = self._server
        return
        yield []

    def all_endpoints(self) -> Plan[list[Endpoint]]:
        """All servers that hold keys."""
        return [self._server]
        yield []

    def on_error(self, commands: RoutedCommands, error: Exception) -> str:
        """What to do about an error reply: AGAIN, LATER (again after a pause) or FAILED."""
        return FAILED

    def on_unreachable(self, endpoint: Endpoint | None) -> None:
        """A server could not be reached."""

    # What they share -----------------------------------------------------------------------------------------------------

    def execute(self, requests: Sequence[AnyRequest], most: int = MAX_REQUESTS) -> Plan[list[StoreError | None]]:
        """Has requests answered, at most so many per script call; returns an error or None for each."""
        errors: list[StoreError | None] = [None] * len(requests)
        pending = list(enumerate(requests))
        for _ in range(MAX_CONVERSIONS):
            calls = self.script_calls([request for _, request in pending], most)
            yield from self.send(calls)
            failed = {id(request): call.error for call in calls if call.error is not None for request in call.requests}
            stale = []
            for at, request in pending:
                if id(request) in failed:
                    errors[at] = failed[id(request)]
                elif request.stale is not None:
                    stale.append((at, request))
                elif request is not requests[at]:
                    requests[at].answer, requests[at].pending, requests[at].stale = request.answer, False, None
            if not stale:
                return errors
            registries = yield from self.read_hashes([key for _, request in stale for key in stale_registries(request)])
            pending = [(at, convert_stale(request, registries)) for at, request in stale]
        for at, _ in pending:
            errors[at] = StoreError("a key changes its rate faster than it can be read; two rates are in use under one name")
        return errors

    def read_hashes(self, keys: Sequence[bytes]) -> Plan[Registries]:
        """The fields of some hashes."""
        keys = list(dict.fromkeys(keys))
        replies = yield from self.query([RoutedCommands([["HGETALL", key]], key) for key in keys])
        found: Mapping[bytes, Mapping[bytes, bytes]] = {
            key: dict(zip(reply[::2], reply[1::2], strict=True)) for key, reply in zip(keys, replies, strict=True)
        }
        return found

    def query(self, some: Sequence[RoutedCommands]) -> Plan[list[Reply]]:
        """The replies of commands; raises the first error."""
        yield from self.send(some)
        raise_first(commands.error for commands in some)
        return [reply for commands in some for reply in commands.replies]

    def send(self, some: Sequence[RoutedCommands]) -> Plan[None]:
        """Sends commands where they belong. Afterwards each has its replies or its error."""
        waiting = list(some)
        for _ in range(self.attempts):
            try:
                yield from self.locate(waiting)
            except StoreError as error:
                for commands in waiting:
                    commands.error = error
                return
            by_endpoint: dict[Endpoint, list[RoutedCommands]] = {}
            for commands in waiting:
                assert commands.endpoint is not None
                by_endpoint.setdefault(commands.endpoint, []).append(commands)
                if isinstance(commands, ScriptCall):
                    commands.loads_before = self._loads
            writes = [[one for commands in group for one in commands.commands()] for group in by_endpoint.values()]
            pairs = zip(by_endpoint, writes, strict=True)
            outcomes: list[Outcome] = yield [exchange(endpoint, self.login, write) for endpoint, write in pairs]
            waiting, pause = [], False
            for (endpoint, group), outcome in zip(by_endpoint.items(), outcomes, strict=True):
                for commands, verdict in zip(group, self._verdicts(endpoint, group, outcome), strict=True):
                    if verdict is not None and verdict != FAILED:
                        waiting.append(commands)
                        pause = pause or verdict == LATER
            if not waiting:
                return
            if pause:
                yield Pause(PAUSE)

    def _verdicts(self, endpoint: Endpoint, group: Sequence[RoutedCommands], outcome: Outcome) -> list[str | None]:
        if not isinstance(outcome, list):
            self.on_unreachable(endpoint)
            for commands in group:
                commands.error = outcome.error if isinstance(outcome, Unsent) else outcome
            return [AGAIN if isinstance(outcome, Unsent) else FAILED] * len(group)
        found: list[str | None] = []
        at = 0
        for commands in group:
            size = len(commands.commands())
            commands.replies = outcome[at : at + size][1::2] if commands.asking else outcome[at : at + size]
            at += size
            found.append(self._verdict(commands))
        return found

    def _verdict(self, commands: RoutedCommands) -> str | None:
        commands.asking = False
        errors = [reply for reply in commands.replies if isinstance(reply, ReplyError)]
        if errors:
            commands.error = unavailable(errors[0], commands.endpoint)
            if error_kind(errors[0]) == "NOSCRIPT" and isinstance(commands, ScriptCall):
                self._load_script(commands)
                return AGAIN
            return self.on_error(commands, errors[0])
        if not commands.decode():
            commands.error = StoreUnavailable(f"{commands.endpoint} gave an unexpected reply: {commands.replies!r}")
            return FAILED
        commands.error = None
        if isinstance(commands, ScriptCall) and commands.send_source:
            self._loads += 1
            self._loaded[commands.endpoint, commands.script.sha] = self._loads
        return None

    def _load_script(self, call: ScriptCall) -> None:
        """Sends the source next. A server that had the script before this call was sent has lost it, and perhaps all its data."""
        call.load_script()
        if self._loaded.get((call.endpoint, call.script.sha), call.loads_before + 1) <= call.loads_before:
            self._loaded = {key: number for key, number in self._loaded.items() if key[0] != call.endpoint}
            self.on_data_loss()


def _ignore() -> None:
    """The default of `Route.on_data_loss`."""
