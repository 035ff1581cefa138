"""Sends commands and script calls to the right server, and sends again what was certainly not executed.

The plan is the same for every topology: locate the servers, write everything in one go to each, and look at the replies. An error
reply that says that nothing was done, and a connection that failed before anything was sent, allow another attempt, at the server
that the topology then names; what may have been executed is never sent again. What takes a moment (LOADING, a slot that moves) is
tried again, after random pauses that grow, until the budget of the call is used up; a server that can't be reached, `attempts`
times. A request that met a key with another rate is sent again with what it takes to read it. `Route` is the topology of a single
server; `sentinel.py` and `cluster.py` are the others.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from ...clock import SYSTEM, Clock
from ...errors import StoreError, StoreTimeout, StoreUnavailable
from ..sans_io import Call, Pause, Plan
from .address import Address, Endpoint
from .limit_and_state_codec import Registries
from .resp import (
    REPLICA,
    Command,
    NotYet,
    Outcome,
    OutOfTime,
    Reply,
    ReplyError,
    TooManyConnections,
    Unsent,
    decode_reply,
    error_kind,
    error_of,
    exchange,
    pack_command,
    unavailable,
)
from .script_builder import script_of
from .script_request import AnyRequest, decode_call, encode_call

#: After an exchange: send again at once, the same over a new connection (`attempts` times), send again after a pause, or leave it
#: as it is (answered or failed).
AGAIN, REOPEN, LATER, DONE = "again", "reopen", "later", "done"
#: Seconds between two attempts at something that takes a moment: a random part, at least half, of FIRST · 2^n, at most LONGEST.
FIRST_PAUSE, LONGEST_PAUSE = 0.004, 0.064
#: Error replies that say that nothing was done, and that it takes a moment.
TEMPORARY = ("LOADING", "TRYAGAIN", "CLUSTERDOWN")
#: Largest number of requests in one script call: a larger batch would delay the server and the callers behind it.
MAX_REQUESTS = 64
#: The same for requests that must be decided at one moment: some milliseconds of server time.
MAX_REQUESTS_AT_ONCE = 1000
#: Number of keys that are scanned, read or written at once.
BATCH = 500
#: How often a request is sent again because it met a rate that it did not know.
MAX_MEETINGS = 4


class RoutedCommand:
    """A command for the server that holds `key`; without a key, for any server. Afterwards `reply` or `error` is set."""

    __slots__ = ("asking", "command", "endpoint", "error", "key", "loads_before", "reply")

    def __init__(self, command: Command, key: bytes | None = None, endpoint: Endpoint | None = None) -> None:
        self.command, self.key, self.endpoint = command, key, endpoint
        self.asking = False  # whether a cluster redirected it with ASK
        self.loads_before = 0  # how many scripts the route had loaded when this was sent
        self.error: StoreError | None = None
        self.reply: Reply = None


class ScriptCall(RoutedCommand):
    """Requests that share one script call."""

    __slots__ = ("requests", "script")

    def __init__(self, requests: Sequence[AnyRequest]) -> None:
        self.requests = requests
        self.script, keys, body = encode_call(requests)
        super().__init__(["EVALSHA", self.script.sha, b"%d" % len(keys), *keys, body], keys[0])

    def send_source(self) -> None:
        self.command = ["EVAL", self.script.source, *self.command[2:]]


def raise_first(some: Iterable[RoutedCommand | AnyRequest]) -> None:
    for one in some:
        if one.error is not None:
            raise one.error


class Route:
    """The topology of a single server."""

    attempts = 3

    def __init__(self, address: Address, clock: Clock = SYSTEM, rng: Random | None = None) -> None:
        self.address = address
        self.login = address.login
        self.clock, self._now_us = clock, clock.now_us
        self.random = (rng or random).random  # the module's generator is seeded again in a forked child
        #: The one server that holds everything, when there is one and it is known: calls to it need no plan.
        self.direct: Endpoint | None = address.endpoints[0]
        #: From this moment `all_endpoints` confirms it.
        self.confirm_at_us = sys.maxsize
        #: Called when a server has lost its data (it was restarted, flushed, or replaced by another).
        self.on_data_loss: Callable[[], None] = lambda: None
        #: Called when a server accepts no more clients.
        self.on_full: Callable[[Endpoint], None] = lambda endpoint: None
        self._loaded: dict[tuple[Endpoint | None, bytes], int] = {}  # (server, SHA) of the scripts sent as source -> load number
        self._loads = 0

    # What topologies differ in -------------------------------------------------------------------------------------------

    def slot_of(self, key: bytes) -> int:
        """Requests whose first keys have the same slot may share a script call."""
        return 0

    def locate(self, some: Sequence[RoutedCommand]) -> Plan[None]:
        """Sets the endpoint of each."""
        (server,) = yield from self.all_endpoints()
        for command in some:
            command.endpoint = server

    def by_server(self, requests: Sequence[Any]) -> Plan[list[list[Any]]]:
        """Requests by the server that answers them, in order."""
        return [list(requests)]
        yield []

    def all_endpoints(self) -> Plan[list[Endpoint]]:
        """All servers that hold keys."""
        return [self.address.endpoints[0]]
        yield []

    def on_error(self, command: RoutedCommand, error: Exception) -> str:
        """What to do about an error reply: AGAIN, REOPEN, LATER (again after a pause) or DONE."""
        return LATER if error_kind(error) in TEMPORARY else REOPEN if error_kind(error) in REPLICA else DONE

    def on_unreachable(self, endpoint: Endpoint | None) -> None:
        """A server could not be reached."""

    def takes_a_moment(self, endpoint: Endpoint, error: object) -> bool:
        """Whether an error says that nothing was done because of something that takes a moment."""
        if isinstance(error, TooManyConnections):
            self.on_full(endpoint)
        return isinstance(error, NotYet) or (isinstance(error, ReplyError) and error_kind(error) in TEMPORARY)

    def is_due(self) -> bool:
        """Whether `direct` is to be confirmed now."""
        return self._now_us() >= self.confirm_at_us

    # How requests of this route's kind are sent --------------------------------------------------------------------------

    def pack(self, request: Any) -> bytes:
        """One request as bytes to send; it has one reply."""
        keys = request.keys
        if len(keys) == 1:
            return pack_command((b"EVALSHA", script_of(request.parts).sha, b"1", keys[0], request.body))
        return pack_command((b"EVALSHA", script_of(request.parts).sha, b"%d" % len(keys), *keys, request.body))

    def decode(self, request: Any, reply: Reply) -> bool:
        """Takes the reply to one request. False: it is not answered, and a plan may try."""
        return decode_call((request,), reply) and not request.pending

    def pack_batch(self, endpoint: Endpoint, requests: Sequence[Any]) -> tuple[bytes, int, Callable[[list[Reply]], bool]]:
        """Several requests as bytes to send, the number of replies, and what takes them, as `decode`."""
        script, keys, body = encode_call(requests)
        is_new = not self.has_loaded(endpoint, script.sha)  # NOSCRIPT would let the next batch overtake this one
        call = (b"EVAL", script.source) if is_new else (b"EVALSHA", script.sha)

        def decode(replies: list[Reply]) -> bool:
            if not decode_call(requests, replies[0]):
                return False
            if is_new:
                self.on_loaded(endpoint, script.sha)
            return not any(request.pending for request in requests)

        return pack_command((*call, b"%d" % len(keys), *keys, body)), 1, decode

    # What they share -----------------------------------------------------------------------------------------------------

    def execute(self, requests: Sequence[Any], most: int = MAX_REQUESTS) -> Plan[None]:
        """Has requests answered, at most so many per script call. Afterwards each has its `error`, None if it has its answer."""
        pending = [(request, request) for request in requests]  # each with what is sent for it
        for _ in range(MAX_MEETINGS):
            stale = [key for _, sent in pending if sent.stale is not None for key in sent.stale_registries()]
            registries = (yield from self.read_hashes(stale)) if stale else {}
            pending = [(request, sent if sent.stale is None else sent.again(registries)) for request, sent in pending]
            calls = self._script_calls([sent for _, sent in pending], most)
            yield from self.send(calls)
            for call in calls:
                for sent in call.requests:
                    sent.error = call.error
            for request, sent in pending:
                request.error = sent.error
                if sent is not request and not sent.pending:
                    request.answer, request.pending, request.stale = sent.answer, False, None
            pending = [(request, sent) for request, sent in pending if sent.error is None and sent.stale is not None]
            if not pending:
                return
        for request, _ in pending:
            request.error = StoreError("a key's rates change faster than they can be read: several processes use different ones")

    def execute_all(self, requests: Sequence[Any], most: int = MAX_REQUESTS) -> Plan[None]:
        """Has requests answered; raises the first error."""
        yield from self.execute(requests, most)
        raise_first(requests)

    def _script_calls(self, requests: Sequence[AnyRequest], most: int) -> list[ScriptCall]:
        by_slot: dict[int, list[AnyRequest]] = {}
        for request in requests:
            by_slot.setdefault(self.slot_of(request.keys[0]), []).append(request)
        return [ScriptCall(group[at : at + most]) for group in by_slot.values() for at in range(0, len(group), most)]

    def read_hashes(self, keys: Iterable[bytes]) -> Plan[Registries]:
        """The fields of some hashes."""
        keys = list(dict.fromkeys(keys))
        replies = yield from self.query([RoutedCommand(["HGETALL", key], key) for key in keys])
        for key, reply in zip(keys, replies, strict=True):
            if not isinstance(reply, list) or len(reply) % 2:
                raise StoreUnavailable(f"{self.address}, hash {key!r} gave an unexpected reply: {type(reply).__name__}")
        return {key: dict(zip(reply[::2], reply[1::2], strict=True)) for key, reply in zip(keys, replies, strict=True)}

    def server_us(self) -> Plan[int]:
        """The server's time in microseconds."""
        (reply,) = yield from self.query([RoutedCommand(["TIME"])])
        seconds, us = decode_reply(reply, lambda pair: (int(pair[0]), int(pair[1])), self.address)
        return seconds * 1_000_000 + us

    def scan(self, pattern: bytes) -> Plan[list[bytes]]:
        """The keys that match a pattern, on all servers."""
        found: dict[bytes, None] = {}
        for server in (yield from self.all_endpoints()):
            cursor = None
            while cursor != b"0":
                command: Command = ["SCAN", cursor or b"0", "MATCH", pattern, "COUNT", b"%d" % BATCH]
                (reply,) = yield from self.query([RoutedCommand(command, endpoint=server)])
                cursor, keys = decode_reply(reply, lambda pair: (bytes(pair[0]), dict.fromkeys(pair[1])), server)
                found.update(keys)
        return list(found)

    def query(self, some: Sequence[RoutedCommand]) -> Plan[list[Reply]]:
        """The replies of commands; raises the first error."""
        yield from self.send(some)
        raise_first(some)
        return [one.reply for one in some]

    def send(self, some: Sequence[RoutedCommand]) -> Plan[None]:
        """Sends commands where they belong. Afterwards each has its reply or its error."""
        waiting, quick, pauses = list(some), 1, 0  # attempts without and with a pause before them
        while waiting:
            later = pauses > 0
            try:
                yield from self.locate(waiting)
            except StoreError as error:
                for one in waiting:
                    one.error = error
                if not (later or isinstance(error, NotYet)):
                    return
                later = True
            else:
                verdicts = yield from self._attempt(waiting, reconnect=quick < self.attempts)
                waiting = [one for one, verdict in verdicts if verdict != DONE]
                later = quick >= self.attempts or any(verdict == LATER for _, verdict in verdicts)
            if not later:
                quick += 1
            elif waiting:
                longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(pauses, 9))
                pauses += 1
                if not (yield Pause(longest * (1 + self.random()) / 2)):
                    return

    def _attempt(self, waiting: Sequence[RoutedCommand], reconnect: bool) -> Plan[list[tuple[RoutedCommand, str]]]:
        """Sends each to its endpoint, once; `reconnect`: what could not be sent may be sent again."""
        by_endpoint: dict[Endpoint, list[RoutedCommand]] = {}
        for one in waiting:
            assert one.endpoint is not None
            if isinstance(one, ScriptCall) and not self.has_loaded(one.endpoint, one.script.sha):
                one.send_source()  # NOSCRIPT would cost another round trip of the budget
            by_endpoint.setdefault(one.endpoint, []).append(one)
            one.loads_before = self._loads
        outcomes: list[Outcome] = yield [self._exchange(endpoint, group) for endpoint, group in by_endpoint.items()]
        verdicts: list[tuple[RoutedCommand, str]] = []
        for (endpoint, group), outcome in zip(by_endpoint.items(), outcomes, strict=True):
            verdicts += zip(group, self._verdicts(endpoint, group, outcome, reconnect), strict=True)
        return verdicts

    def _exchange(self, endpoint: Endpoint, group: Sequence[RoutedCommand]) -> Call:
        commands = [command for one in group for command in ([["ASKING"], one.command] if one.asking else [one.command])]
        return exchange(endpoint, self.login, commands)

    def _verdicts(self, endpoint: Endpoint, group: Sequence[RoutedCommand], outcome: Outcome, reconnect: bool) -> list[str]:
        if not isinstance(outcome, list):
            unsent = isinstance(outcome, Unsent)
            for one in group:
                # A budget that ended before the next attempt was sent says less than what became of the last.
                if not (unsent and isinstance(one.error, NotYet | StoreTimeout) and isinstance(error_of(outcome), StoreTimeout)):
                    one.error = error_of(outcome)
            if self.takes_a_moment(endpoint, group[0].error):
                return [LATER] * len(group)
            if isinstance(error_of(outcome), OutOfTime):
                return [DONE] * len(group)
            self.on_unreachable(endpoint)
            return [AGAIN if reconnect and unsent else DONE] * len(group)
        replies = iter(outcome)
        for one in group:
            if one.asking:
                next(replies)
            one.asking, one.reply = False, next(replies)
        verdicts = [self._verdict(one) for one in group]
        return [(AGAIN if reconnect else DONE) if verdict == REOPEN else verdict for verdict in verdicts]

    def _verdict(self, one: RoutedCommand) -> str:
        if isinstance(one.reply, ReplyError):
            one.error = unavailable(one.reply, one.endpoint)
            if error_kind(one.reply) != "NOSCRIPT" or not isinstance(one, ScriptCall):
                return self.on_error(one, one.reply)
            self._load_script(one)
            return AGAIN
        one.error = None
        if isinstance(one, ScriptCall):
            try:
                decoded = decode_call(one.requests, one.reply)
            except StoreUnavailable:
                decoded = False
            if not decoded:
                one.error = StoreUnavailable(f"{one.endpoint} gave an unexpected reply: {str(one.reply)[:200]}")
            elif one.command[0] == "EVAL":
                self.on_loaded(one.endpoint, one.script.sha)
        return DONE

    def has_loaded(self, endpoint: Endpoint, sha: bytes) -> bool:
        """Whether a script was sent to a server as source; it may have lost it since."""
        return (endpoint, sha) in self._loaded

    def on_loaded(self, endpoint: Endpoint | None, sha: bytes) -> None:
        self._loads += 1
        self._loaded[endpoint, sha] = self._loads

    def _load_script(self, call: ScriptCall) -> None:
        """Sends the source next. A server that had the script before this call was sent has lost it, and perhaps all its data."""
        call.send_source()
        if self._loaded.get((call.endpoint, call.script.sha), call.loads_before + 1) <= call.loads_before:
            self._loaded = {key: number for key, number in list(self._loaded.items()) if key[0] != call.endpoint}
            self.on_data_loss()
