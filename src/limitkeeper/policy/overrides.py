"""Overrides: limits of single keys that change while the program runs, such as a customer's new plan.

Two sources. `CalledOverrides` calls a function of the application and caches its answer; the function runs while a request is
evaluated, so it should answer from memory. `HashOverrides` reads a Redis hash (key → limit as text) every few seconds, in a
thread; a request only reads a dict. Errors are logged and counted, and the last known limits stay; without any, the rule's own.

Readers of one hash are shared in a process, and a new one begins with the limits of the last: a reload continues with them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from ..algorithms.limit import Limit
from ..algorithms.limit_parser import parse_limits
from ..clock import SYSTEM, Clock
from ..errors import ConfigurationError, InvalidLimit
from ..fork import call_after_fork, reset_after_fork
from .identity.bounded_keys import MAX_KEY_LENGTH, remember
from .identity.callback_errors import CallbackErrors, callback_name, check_callback
from .model import Limits

if TYPE_CHECKING:
    from ..stores.redis.hash_reader import RedisHash

log = logging.getLogger("limitkeeper")

UNLIMITED = "unlimited"
#: How many keys' answers are remembered.
MAX_CACHED = 16_384
MAX_HASHES = 16
MIN_REFRESH_US = 10_000
#: The most invalid fields of one reading that are logged, and how much of each is shown.
MAX_LOGGED, SHOWN = 10, 60


def limits_of(value: object) -> Limits | None:
    """The limits of an override: text, a limit, several of them, "unlimited", or None: no override. InvalidLimit otherwise."""
    if value is None:
        return None
    if isinstance(value, Limit):
        return (value,)
    if isinstance(value, str):
        return () if value.strip().lower() == UNLIMITED else tuple(parse_limits(value))
    if isinstance(value, (list, tuple)) and value:
        return tuple(one for part in value for one in (limits_of(part) or ()))
    raise InvalidLimit(
        f"expected a limit, got a {type(value).__name__}; write 'token bucket 5/s burst 10', a limit, 'unlimited' or None"
    )


class CalledOverrides:
    """`call(key)` says the limit of a key (text, Limit, "unlimited"), or None; its answer is kept for `keep_us`."""

    def __init__(self, call: Callable[[str], object], keep_us: int = 10_000_000, clock: Clock = SYSTEM) -> None:
        check_callback(call)
        if keep_us < 0:
            raise ConfigurationError(f"keep: {keep_us} µs; write how long an answer is kept, such as 10s")
        self.call = call
        self.keep_us = keep_us
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
            return limits_of(self.call(key))
        except InvalidLimit as error:
            self.callback_errors.report("%s: %s; the limit stays as it was", callback_name(self.call), error)
        except Exception as error:
            self.callback_errors.report("%s raised %s; the limit stays as it was", callback_name(self.call), type(error).__name__)
        return known

    def close(self) -> None:
        """Clears the cache."""
        self._cached.clear()


class HashOverrides:
    """Limits in a Redis hash, read every `refresh_us`. Nothing happens before the first `get` (or `begin`)."""

    def __init__(self, url: str, hash: str, refresh_us: int = 5_000_000) -> None:
        if refresh_us < MIN_REFRESH_US:
            raise ConfigurationError(f"refresh: {refresh_us} µs; write at least 10ms: the whole hash is read each time")
        if not hash:
            raise ConfigurationError("redis_hash: write the key of the hash, such as shop:limits")
        self.url = url
        self.hash = hash
        self.refresh_us = refresh_us
        self._reader: Reader | None = None
        _hash_of(url, hash)  # an invalid URL is an error now

    def __repr__(self) -> str:
        return f"HashOverrides({self.hash!r}, refresh_us={self.refresh_us})"

    def begin(self) -> Reader:
        """Starts reading, or shares the reader of the same hash."""
        with _lock:
            if self._reader is None:
                self._reader = _join(self.url, self.hash, self.refresh_us)
            return self._reader

    def get(self, key: str) -> Limits | None:
        reader = self._reader
        if reader is None:
            reader = self.begin()
        return reader.limits.get(key)

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
            last = reader is not None and _release(reader)
        if reader is not None and last:
            reader.stop()


def _hash_of(url: str, name: str) -> RedisHash:
    from ..stores.redis.hash_reader import RedisHash

    return RedisHash(url, name)


class Reader:
    """The thread that reads one hash, shared by all its users in this process."""

    def __init__(self, url: str, name: str, refresh_us: int) -> None:
        self.id = (url, name, refresh_us)
        self.limits: dict[str, Limits] = _known.get((url, name), {})
        self.first = threading.Event()
        self.callback_errors = CallbackErrors()
        self.users = 0
        self._parsed: dict[bytes, Limits] = {}  # by text: many keys share few limits
        self._invalid: set[tuple[bytes, bytes]] = set()  # fields that were logged
        self.start()
        reset_after_fork(self)

    def start(self) -> None:
        """Starts the thread; in a forked child again, with the limits that the parent knew."""
        self._hash = _hash_of(*self.id[:2])
        self._stop_queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=self._read_on, args=(self._hash, self._stop_queue), name="limitkeeper overrides", daemon=True
        )
        self.thread.start()

    def _reset_after_fork(self) -> None:
        """Starts the thread again, unless the reader has been stopped: a child has none of its parent's threads."""
        if _readers.get(self.id) is self:
            self.start()

    def stop(self) -> None:
        self._stop_queue.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(self._hash.timeout_us / 1e6 + 1)

    def _read_on(self, hash: RedisHash, stop_queue: queue.SimpleQueue[None]) -> None:
        try:
            while True:
                self.look(hash)
                try:
                    stop_queue.get(timeout=self.id[2] / 1e6)
                    return
                except queue.Empty:
                    pass
        finally:
            hash.close()

    def look(self, hash: RedisHash) -> None:
        """Reads the hash once. After an error the known limits stay."""
        try:
            fields = hash.read()
        except Exception as error:
            self.callback_errors.report("limits of single keys can't be read (%s); those known stay", error)
            return
        invalid: dict[tuple[bytes, bytes], Exception] = {}
        found: dict[str, Limits] = {}
        for field, text in fields.items():
            try:
                found[field.decode("utf-8", "surrogateescape")] = self._parse(text)
            except (InvalidLimit, UnicodeDecodeError) as error:
                invalid[field, text] = error
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
            limits = self._parsed[text] = limits_of(text.decode()) or ()
        return limits

    def _log_invalid(self, invalid: dict[tuple[bytes, bytes], Exception]) -> None:
        """Logs each invalid field when it is first seen."""
        new = {said: error for said, error in invalid.items() if said not in self._invalid}
        self._invalid = set(invalid)
        self.callback_errors.count += len(new)
        for (field, text), error in islice(new.items(), MAX_LOGGED):
            log.warning("hash %r, field %r: %r is skipped: %s", self.id[1], field[:SHOWN], text[:SHOWN], error)
        if len(new) > MAX_LOGGED:
            log.warning("hash %r: %d more fields make no sense; they are skipped too", self.id[1], len(new) - MAX_LOGGED)


_readers: dict[tuple[str, str, int], Reader] = {}
_known: dict[tuple[str, str], dict[str, Limits]] = {}  # limits of readers that have ended
_lock = threading.Lock()


def _join(url: str, name: str, refresh_us: int) -> Reader:
    """The reader of a hash, created if there is none. The caller holds the lock."""
    reader = _readers.get((url, name, refresh_us))
    if reader is None:
        reader = _readers[url, name, refresh_us] = Reader(url, name, refresh_us)
    reader.users += 1
    return reader


def _release(reader: Reader) -> bool:
    """Whether a reader has no users any more. The caller holds the lock."""
    reader.users -= 1
    if reader.users == 0:
        del _readers[reader.id]
        remember(_known, reader.id[:2], reader.limits, MAX_HASHES)
    return reader.users == 0


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


call_after_fork(_after_fork)
