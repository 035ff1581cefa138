"""Overrides of the application: limits of single keys from a function or a Redis hash, such as a customer's new plan.

`CalledOverrides` calls a function of the application, which should answer from memory, and caches its answer. `HashOverrides`
reads a Redis hash (key → limit as text) every few seconds, in a thread; a request only reads a dict. Errors are logged and
counted, and the last known limits stay; without any, the rule's own. Readers of one hash are shared in a process, and a new one
begins with the limits of the last: a reload continues with them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from ..algorithms.limit import Limit
from ..algorithms.limit_parser import parse_limits
from ..algorithms.token_bucket import TokenBucket
from ..clock import SYSTEM, Clock
from ..errors import ConfigurationError, InvalidLimit
from ..fork import call_after_fork
from ..periodic_thread import PeriodicThread
from ..stores.guarded.deadline_store import StartThread, start_daemon
from .callback_errors import CallbackErrors, callback_name, check_callback
from .identity.key_and_cache_bounds import MAX_KEY_LENGTH, remember
from .model import BLOCKED, BLOCKED_TEXT, Blocked, Limits, Tiers

if TYPE_CHECKING:
    from ..stores.redis import RedisStore

log = logging.getLogger("limitkeeper")

UNLIMITED = "unlimited"
#: How many keys' answers are remembered.
MAX_CACHED = 16_384
MAX_HASHES = 16
MIN_REFRESH_US = 10_000
#: The most invalid fields of one reading that are logged, and how much of each is shown.
MAX_LOGGED, SHOWN = 10, 60


def together(several: Sequence[Limits]) -> Limits:
    """Limits that are charged together; blocked where one of them is."""
    return BLOCKED if BLOCKED in several else tuple(one for limits in several for one in limits)


def limits_of(value: object, algorithm: str = TokenBucket.kind) -> Limits | None:
    """The limits of an override: text, a limit, several of them, "unlimited", "blocked", or None: no override. InvalidLimit
    otherwise. `algorithm` is that of a rate alone."""
    if value is None:
        return None
    if isinstance(value, Limit):
        return (value,)
    if isinstance(value, str):
        unlimited, blocked = value.strip().lower() == UNLIMITED, BLOCKED_TEXT.fullmatch(value)
        return () if unlimited else BLOCKED if blocked else tuple(parse_limits(value, algorithm))
    if isinstance(value, (list, tuple)) and value:
        return together([limits_of(part, algorithm) or () for part in value])
    raise InvalidLimit(
        f"expected a limit, got a {type(value).__name__}; "
        "write 'token bucket 5/s burst 10', a limit, 'unlimited', 'blocked' or None"
    )


def algorithm_of(limit: Limits | Tiers) -> str:
    """The algorithm of a rate alone in the overrides of a rule: the rule's, where its limits have only one."""
    limits = (*limit.otherwise, *(one for _, some in limit.limits for one in some)) if isinstance(limit, Tiers) else limit
    kinds = {type(one).kind for one in limits} - {Blocked.kind}
    return kinds.pop() if len(kinds) == 1 else TokenBucket.kind


class CalledOverrides:
    """`call(key)` says the limit of a key (text, Limit, "unlimited"), or None; its answer is kept for `keep_us`."""

    def __init__(
        self,
        call: Callable[[str], object],
        keep_us: int = 10_000_000,
        clock: Clock = SYSTEM,
        algorithm: str = TokenBucket.kind,
    ) -> None:
        check_callback(call, "key")
        if keep_us < 0:
            raise ConfigurationError(f"keep: {keep_us} µs; write how long an answer is kept, such as 10s")
        self.call = call
        self.keep_us = keep_us
        self.algorithm = algorithm
        self.callback_errors = CallbackErrors()
        self._clock = clock
        self._cached: dict[str, tuple[int, Limits | None]] = {}

    def __repr__(self) -> str:
        return f"CalledOverrides({callback_name(self.call)}, keep_us={self.keep_us})"

    @property
    def failures(self) -> int:
        """How often the callback raised, or returned no valid limit."""
        return self.callback_errors.count

    def get(self, key: str) -> Limits | None:
        kept = self._cached.get(key)
        now = self._clock.now_us()
        if kept is not None and 0 <= now - kept[0] < self.keep_us:
            return kept[1]
        found = self._call(key, None if kept is None else kept[1])
        remember(self._cached, key, (now, found), MAX_CACHED)
        return found

    def _call(self, key: str, known: Limits | None) -> Limits | None:
        try:
            return limits_of(self.call(key), self.algorithm)
        except InvalidLimit as error:
            self.callback_errors.report("%s: %s; the limit stays as it was", callback_name(self.call), error)
        except Exception as error:
            name = callback_name(self.call)
            self.callback_errors.report("%s raised %s; the limit stays as it was", name, type(error).__name__, raised=error)
        return known

    def close(self) -> None:
        """Clears the cache."""
        self._cached.clear()


@dataclass(slots=True, eq=False)
class HashOverrides:
    """Limits in a Redis hash, read every `refresh_us`. Nothing happens before the first `get` (or `begin`)."""

    url: str = field(repr=False)  # may hold a password
    hash: str
    refresh_us: int = 5_000_000
    start_thread: StartThread = field(default=start_daemon, repr=False)
    algorithm: str = TokenBucket.kind
    _reader: HashReader | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.refresh_us < MIN_REFRESH_US:
            raise ConfigurationError(f"refresh: {self.refresh_us} µs; write at least 10ms: the whole hash is read each time")
        if not self.hash:
            raise ConfigurationError("redis_hash: write the key of the hash, such as shop:limits")
        _store_of(self.url)  # an invalid URL is an error now

    def begin(self) -> HashReader:
        """Starts reading, or shares the reader of the same hash."""
        with _lock:
            if self._reader is None:
                reader_id = (self.url, self.hash, self.algorithm, self.refresh_us)
                if reader_id not in _readers:
                    _readers[reader_id] = HashReader(reader_id, self.start_thread)
                self._reader = _readers[reader_id]
                self._reader.users += 1
            return self._reader

    def get(self, key: str) -> Limits | None:
        return (self._reader or self.begin()).limits.get(key)

    def ready(self, timeout: float = 1.0) -> bool:
        """Waits until the hash has been read once; False after `timeout` seconds."""
        return self.begin().first.wait(timeout)

    @property
    def failures(self) -> int:
        """How often the hash could not be read, or a field of it was invalid."""
        reader = self._reader
        return 0 if reader is None else reader.callback_errors.count

    def close(self) -> None:
        """Stops reading, unless the reader has other users."""
        with _lock:
            reader, self._reader = self._reader, None
            if reader is None:
                return
            reader.users -= 1
            if reader.users:
                return
            del _readers[reader.id]
            remember(_known, reader.id[:3], reader.limits, MAX_HASHES)
        reader.stop()


def _store_of(url: str) -> RedisStore:
    """The store whose connections read a hash; `url` may have the options of wrappers."""
    from ..stores.redis import RedisStore
    from ..stores.redis.address import address_only

    try:
        return RedisStore(address_only(url), timeout=1)
    except ModuleNotFoundError:
        raise ConfigurationError("limits from a Redis hash need hiredis: pip install 'limitkeeper[redis]'") from None


class HashReader(PeriodicThread):
    """The thread that reads one hash, shared by all its users in this process."""

    def __init__(self, id: tuple[str, str, str, int], start_thread: StartThread) -> None:
        self.id = id
        self.limits: dict[str, Limits] = _known.get(id[:3], {})
        self.first = threading.Event()
        self.callback_errors = CallbackErrors()
        self.users = 0
        self._parsed: dict[bytes, Limits] = {}  # by text: many keys share few limits
        self._invalid: set[tuple[bytes, bytes]] = set()  # fields that were logged
        self._store = _store_of(id[0])
        super().__init__("limitkeeper overrides", id[3], start_thread, at_once=True)

    def stop(self, timeout: float = 2.0) -> None:  # the budget of one reading, and a second
        super().stop(timeout)
        self._store.close()

    def work(self, woken: bool) -> None:
        """Reads the hash once. After an error the known limits stay."""
        try:
            fields = self._store.read_hash(self.id[1])
        except Exception as error:
            self.callback_errors.report("limits of single keys can't be read (%s); those known stay", error)
            return
        invalid: dict[tuple[bytes, bytes], Exception] = {}
        found: dict[str, Limits] = {}
        for name, text in fields.items():
            try:
                found[name.decode("utf-8", "surrogateescape")] = self._parse(text)
            except (InvalidLimit, UnicodeDecodeError) as error:
                invalid[name, text] = error
        self.limits = found
        self._log_invalid(invalid)
        texts = set(fields.values())
        self._parsed = {text: limits for text, limits in self._parsed.items() if text in texts}
        self.first.set()

    def _parse(self, text: bytes) -> Limits:
        limits = self._parsed.get(text)
        if limits is None:
            if len(text) > MAX_KEY_LENGTH:
                raise InvalidLimit(f"{len(text)} bytes are no limit; write it like 'token bucket 5/s burst 10'")
            limits = self._parsed[text] = limits_of(text.decode(), self.id[2]) or ()
        return limits

    def _log_invalid(self, invalid: dict[tuple[bytes, bytes], Exception]) -> None:
        """Logs each invalid field when it is first seen."""
        new = {said: error for said, error in invalid.items() if said not in self._invalid}
        self._invalid = set(invalid)
        self.callback_errors.count += len(new)
        for (name, text), error in islice(new.items(), MAX_LOGGED):
            log.warning("hash %r, field %r: %r is skipped: %s", self.id[1], name[:SHOWN], text[:SHOWN], error)
        if len(new) > MAX_LOGGED:
            log.warning("hash %r: %d more fields make no sense; they are skipped too", self.id[1], len(new) - MAX_LOGGED)


_readers: dict[tuple[str, str, str, int], HashReader] = {}
_known: dict[tuple[str, str, str], dict[str, Limits]] = {}  # limits of readers that have ended
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


call_after_fork(_after_fork)
