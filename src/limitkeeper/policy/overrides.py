"""Limits of single keys that change while the program runs: a customer's new plan needs no deploy.

Two sources. `CalledOverrides` asks a function of the application and keeps what it said for a while; the function runs while a
request is decided, so it should answer from memory. `HashOverrides` reads a hash in Redis (key → text of a limit) in a thread of
its own, every few seconds; a request only ever looks into a dict. Either way, what fails is logged and counted, and the last
that was known stands; where nothing was known, the rule's own limit.

Readers of one hash are shared in a process, and a new one begins with what the last one knew: a policy that is loaded again goes
on where its forerunner was.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any

from ..algorithms.limit import Limit
from ..algorithms.limit_parser import parse_limits
from ..clock import SYSTEM, Clock
from ..errors import ConfigurationError, InvalidLimit
from ..fork import call_after_fork, reset_after_fork
from .identity.callback_errors import CallbackErrors, callback_name, check_callback
from .identity.key_hashing import MAX_KEY_LENGTH, remember
from .model import Limits

log = logging.getLogger("limitkeeper")

UNLIMITED = "unlimited"
#: How many keys' answers are remembered.
MOST_KEPT = 16_384
MOST_HASHES = 16
LEAST_REFRESH_US = 10_000
#: So many senseless fields of one reading get a line each, and so much of them is shown.
MOST_TOLD, SHOWN = 10, 60


def limits_of(said: Any) -> Limits | None:
    """What an override says: a text, a limit, several of them, "unlimited", or None: nothing. InvalidLimit: nonsense."""
    if said is None:
        return None
    if isinstance(said, Limit):
        return (said,)
    if isinstance(said, str):
        return () if said.strip().lower() == UNLIMITED else tuple(parse_limits(said))
    if isinstance(said, (list, tuple)) and said:
        return tuple(one for part in said for one in (limits_of(part) or ()))
    raise InvalidLimit(f"a {type(said).__name__} is no limit; write 'token bucket 5/s burst 10', a limit, 'unlimited' or None")


class CalledOverrides:
    """`call(key)` says the limit of a key (text, Limit, "unlimited"), or None; its answer is kept for `keep_us`."""

    def __init__(self, call: Callable[[str], Any], keep_us: int = 10_000_000, clock: Clock = SYSTEM) -> None:
        check_callback(call)
        if keep_us < 0:
            raise ConfigurationError(f"keep: {keep_us} µs; write how long an answer is kept, such as 10s")
        self.call = call
        self.keep_us = keep_us
        self.callback_errors = CallbackErrors()
        self._clock = clock
        self._kept: dict[str, tuple[int, Limits | None]] = {}

    def __repr__(self) -> str:
        return f"CalledOverrides({callback_name(self.call)}, keep_us={self.keep_us})"

    @property
    def failures(self) -> int:
        """How often the function raised, or answered what is no limit."""
        return self.callback_errors.count

    def get(self, key: str) -> Limits | None:
        kept = self._kept.get(key)
        now = self._clock.now_us()
        if kept is not None and 0 <= now - kept[0] < self.keep_us:
            return kept[1]
        found = self._asked(key, None if kept is None else kept[1])
        remember(self._kept, key, (now, found), MOST_KEPT)
        return found

    def _asked(self, key: str, known: Limits | None) -> Limits | None:
        try:
            return limits_of(self.call(key))
        except InvalidLimit as error:
            self.callback_errors.report("%s: %s; the limit stays as it was", callback_name(self.call), error)
        except Exception as error:
            self.callback_errors.report("%s raised %s; the limit stays as it was", callback_name(self.call), type(error).__name__)
        return known

    def close(self) -> None:
        """Forgets what it kept."""
        self._kept.clear()


class HashOverrides:
    """Limits in a Redis hash, read every `refresh_us`. Nothing happens before the first `get` (or `begin`)."""

    def __init__(self, url: str, hash: str, refresh_us: int = 5_000_000) -> None:
        if refresh_us < LEAST_REFRESH_US:
            raise ConfigurationError(f"refresh: {refresh_us} µs; write at least 10ms: the whole hash is read each time")
        if not hash:
            raise ConfigurationError("redis_hash: write the key of the hash, such as shop:limits")
        self.url = url
        self.hash = hash
        self.refresh_us = refresh_us
        self._reader: Reader | None = None
        _hash_of(url, hash)  # a mistake in the URL is told now

    def __repr__(self) -> str:
        return f"HashOverrides({self.hash!r}, refresh_us={self.refresh_us})"

    def begin(self) -> Reader:
        """Starts reading, or joins whoever reads the same hash already."""
        with _lock:
            if self._reader is None:
                self._reader = _joined(self.url, self.hash, self.refresh_us)
            return self._reader

    def get(self, key: str) -> Limits | None:
        reader = self._reader
        if reader is None:
            reader = self.begin()
        return reader.limits.get(key)

    def ready(self, timeout: float = 1.0) -> bool:
        """Waits until the hash has been read once; for programs that want to begin with it."""
        return self.begin().first.wait(timeout)

    @property
    def failures(self) -> int:
        """How often the hash could not be read, or a field of it not be understood."""
        reader = self._reader
        return 0 if reader is None else reader.callback_errors.count

    def close(self) -> None:
        """Stops reading, unless somebody else wants the same hash."""
        with _lock:
            reader, self._reader = self._reader, None
            last = reader is not None and _left(reader)
        if reader is not None and last:
            reader.stop()


def _hash_of(url: str, name: str) -> Any:
    from ..stores.redis.hash_reader import RedisHash

    return RedisHash(url, name)


class Reader:
    """The thread that reads one hash, for everybody in this process who wants it."""

    def __init__(self, url: str, name: str, refresh_us: int) -> None:
        self.id = (url, name, refresh_us)
        self.limits: dict[str, Limits] = _known.get((url, name), {})
        self.first = threading.Event()
        self.callback_errors = CallbackErrors()
        self.users = 0
        self._understood: dict[bytes, Limits] = {}  # by text: plans are few, customers many
        self._misread: set[tuple[bytes, bytes]] = set()  # fields that were complained of
        self.start()
        reset_after_fork(self)

    def start(self) -> None:
        """Begins the thread; in a child process once more, where what the parent knew stays."""
        self._hash = _hash_of(*self.id[:2])
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=self._read_on, args=(self._hash, self._bell), name="limitkeeper overrides", daemon=True
        )
        self.thread.start()

    def _reset_after_fork(self) -> None:
        """Starts the thread again, unless the reader has been stopped: a child has none of its parent's threads."""
        if _readers.get(self.id) is self:
            self.start()

    def stop(self) -> None:
        self._bell.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(self._hash.timeout_us / 1e6 + 1)

    def _read_on(self, hash: Any, bell: queue.SimpleQueue[None]) -> None:
        try:
            while True:
                self.look(hash)
                try:
                    bell.get(timeout=self.id[2] / 1e6)
                    return
                except queue.Empty:
                    pass
        finally:
            hash.close()

    def look(self, hash: Any) -> None:
        """Reads the hash once. Whatever goes wrong, what was known stays."""
        try:
            fields = hash.read()
        except Exception as error:
            self.callback_errors.report("limits of single keys can't be read (%s); those known stay", error)
            return
        misread: dict[tuple[bytes, bytes], Exception] = {}
        found: dict[str, Limits] = {}
        for field, text in fields.items():
            try:
                found[field.decode("utf-8", "surrogateescape")] = self._understand(text)
            except (InvalidLimit, UnicodeDecodeError) as error:
                misread[field, text] = error
        self.limits = found
        self._tell(misread)
        texts = set(fields.values())
        self._understood = {text: limits for text, limits in self._understood.items() if text in texts}
        self.first.set()

    def _understand(self, text: bytes) -> Limits:
        limits = self._understood.get(text)
        if limits is None:
            if len(text) > MAX_KEY_LENGTH:
                raise InvalidLimit(f"{len(text)} bytes are no limit; write it like 'token bucket 5/s burst 10'")
            limits = self._understood[text] = limits_of(text.decode()) or ()
        return limits

    def _tell(self, misread: dict[tuple[bytes, bytes], Exception]) -> None:
        """One line for each field that makes no sense, when it is first seen so."""
        new = {said: error for said, error in misread.items() if said not in self._misread}
        self._misread = set(misread)
        self.callback_errors.count += len(new)
        for (field, text), error in islice(new.items(), MOST_TOLD):
            log.warning("hash %r, field %r: %r is skipped: %s", self.id[1], field[:SHOWN], text[:SHOWN], error)
        if len(new) > MOST_TOLD:
            log.warning("hash %r: %d more fields make no sense; they are skipped too", self.id[1], len(new) - MOST_TOLD)


_readers: dict[tuple[str, str, int], Reader] = {}
_known: dict[tuple[str, str], dict[str, Limits]] = {}  # what readers knew that have ended
_lock = threading.Lock()


def _joined(url: str, name: str, refresh_us: int) -> Reader:
    """The reader of a hash, begun when there is none. The lock is held."""
    reader = _readers.get((url, name, refresh_us))
    if reader is None:
        reader = _readers[url, name, refresh_us] = Reader(url, name, refresh_us)
    reader.users += 1
    return reader


def _left(reader: Reader) -> bool:
    """Whether nobody wants this reader any more. The lock is held."""
    reader.users -= 1
    if reader.users == 0:
        del _readers[reader.id]
        remember(_known, reader.id[:2], reader.limits, MOST_HASHES)
    return reader.users == 0


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


call_after_fork(_after_fork)
