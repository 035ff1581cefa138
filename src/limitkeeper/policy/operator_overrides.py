"""Overrides of operators: limits of single keys, or of patterns such as `premium_*`, set at run time and kept in the store.

    rule, key → limit ("token bucket 50/s burst 100", "unlimited", "blocked"), until when, why, and by whom

Every gate over the store follows a change within a second: one thread of the process reads the hashes of all its stores every
500 ms (a MemoryStore announces changes itself). A request only reads a dict, and only under a rule that has such overrides. An
operator's override precedes those of the policy. An exact key precedes patterns; of patterns the one with most characters
besides `*` holds. State follows from the rate, as for every override: a key's rates are charged together.

When the store can't be read, the overrides that are known stay, and end when they expire by the gate's clock.
"""

from __future__ import annotations

import json
import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

from ..clock import Clock
from ..errors import ConfigurationError, InvalidLimit
from ..fork import reset_after_fork
from ..periodic_thread import PeriodicThread
from ..stores.sans_io import WakeEvent
from ..stores.store_hash import MemoryHash, StoreHash
from .application_overrides import MAX_CACHED, algorithm_of, limits_of
from .callback_errors import CallbackErrors
from .identity.addresses import read_address
from .identity.client_ip import ClientIp
from .identity.key_and_cache_bounds import MAX_KEY_LENGTH, hash_long, remember
from .model import Limits

if TYPE_CHECKING:
    from .compiled_policy import CompiledPolicy
    from .compiled_rule import CompiledRule
    from .gate import Gate

log = logging.getLogger("limitkeeper")

INTERVAL_US = 500_000
#: The most overrides of a policy, the longest reason, and the most `*` in a pattern.
MAX_OVERRIDES, MAX_REASON, MAX_STARS = 1000, 200, 8
#: The longest text of a limit: every decision of the key asks each limit in it.
MAX_LIMIT = 500
#: The longest duration of an override, in microseconds: a year. One for longer is a mistake, or belongs into the policy.
MAX_DURATION_US = 366 * 86_400_000_000
ANY = "*"


class OperatorOverride(NamedTuple):
    """One override. Times are UTC, in microseconds since 1970; `until_us` 0: it does not expire."""

    rule: str
    key: str
    limit: str
    until_us: int = 0
    reason: str = ""
    by: str = ""
    made_us: int = 0

    def to_dict(self) -> dict[str, object]:
        """For JSON; times in seconds, None: it does not expire."""
        times = {"until": self.until_us / 1e6 or None, "made": self.made_us / 1e6}
        return {"rule": self.rule, "key": self.key, "limit": self.limit, "reason": self.reason, "by": self.by, **times}

    def holds(self, now_us: int) -> bool:
        return not self.until_us or now_us < self.until_us


FIELD_TYPES = [type(one) for one in OperatorOverride("", "", "")]


def matches(pattern: str, key: str) -> bool:
    """Whether a key matches a pattern in which `*` stands for any text; linear in the length of the key for each `*`."""
    first, *rest = pattern.split(ANY)
    if not rest:
        return key == pattern
    last = rest.pop()
    if not key.startswith(first) or not key.endswith(last) or len(key) < len(first) + len(last):
        return False
    at, end = len(first), len(key) - len(last)
    for part in rest:
        at = key.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def rule_limits(text: str, algorithm: str) -> Limits:
    """The limits of an override under a rule: a rate alone has the rule's algorithm; with an option of a token bucket, which the
    rule's lacks, it is one."""
    try:
        return limits_of(text, algorithm) or ()
    except InvalidLimit:
        return limits_of(text) or ()


def counted_key(rule: CompiledRule, key: str) -> str:
    """A key of a rule with its addresses as requests from there are counted: an IPv6 address by its network."""
    parts = key.split("|") if len(rule.key) > 1 else [key]
    if len(parts) != len(rule.key):
        return key
    return "|".join([counted_part(rule, names, part) for names, part in zip(rule.key, parts, strict=True)])


def counted_part(rule: CompiledRule, names: tuple[str, ...], part: str) -> str:
    for name in names:
        identity, text = rule.identities[name], part.removeprefix(f"{name}:") if len(names) > 1 else part
        address = read_address(text)
        if isinstance(identity, ClientIp) and address is not None:
            return part.removesuffix(text) + identity.key_of(address)
    return part


class RuleOverrides:
    """The overrides of one rule, for `CompiledRule.entries_for`."""

    def __init__(self, found: list[tuple[OperatorOverride, Limits]], clock: Clock) -> None:
        self._clock = clock
        self._exact = {one.key: (one, limits) for one, limits in found if ANY not in one.key}
        patterns = [(one, limits) for one, limits in found if ANY in one.key]
        self._patterns = sorted(patterns, key=lambda pair: (pair[0].key.count(ANY) - len(pair[0].key), pair[0].key))
        self._cached: dict[str, tuple[OperatorOverride, Limits] | None] = {}

    def get(self, key: str, value: str) -> Limits | None:
        """The limits of a key; `value` is the key without the names of its identities."""
        try:
            found = self._cached[key]
        except KeyError:
            found = remember(self._cached, key, self._find(key, value), MAX_CACHED)
        if found is not None and not found[0].holds(self._clock.now_us()):
            found = remember(self._cached, key, self._find(key, value), MAX_CACHED)
        return None if found is None else found[1]

    def _find(self, key: str, value: str) -> tuple[OperatorOverride, Limits] | None:
        now_us = self._clock.now_us()
        names = (key, value, hash_long(key), hash_long(value))  # long keys are kept as their hashes
        pairs = [self._exact[one] for one in dict.fromkeys(names) if one in self._exact]
        pairs += [pair for pair in self._patterns if matches(pair[0].key, key) or matches(pair[0].key, value)]
        return next((pair for pair in pairs if pair[0].holds(now_us)), None)

    def close(self) -> None:
        """Nothing is open."""


class OperatorOverrides:
    """The overrides of one policy in one store, for the gates that `follow` them."""

    def __init__(self, hash: StoreHash, clock: Clock) -> None:
        self.callback_errors = CallbackErrors()
        self._hash, self._clock = hash, clock
        self._gates: WeakSet[Gate] = WeakSet()
        self._read: dict[str, str] = {}
        self._rules: dict[str, list[OperatorOverride]] = {}
        self._ready = WakeEvent()
        self._failing = self._closed = False
        self._reset_after_fork()
        reset_after_fork(self)
        if isinstance(hash, MemoryHash):
            hash.listeners[id(self)] = self
        if hash.quick:
            self.try_refresh()
        if hash.polled:
            _poll(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.RLock()

    # Following -------------------------------------------------------------------------------------------------

    def follow(self, gate: Gate, compiled: CompiledPolicy) -> None:
        """Applies the overrides to a compiled policy, and from now on to the one that the gate enforces."""
        with self._lock:
            self._gates.add(gate)
            self._apply(gate, compiled)

    def leave(self, gate: Gate) -> None:
        with self._lock:
            self._gates.discard(gate)

    def ready(self, timeout: float) -> bool:
        """Waits until the overrides have been read once; False after `timeout` seconds."""
        return self._ready.wait(timeout)

    def _apply(self, gate: Gate, compiled: CompiledPolicy) -> None:
        for rule in compiled.rules:
            found, algorithm = self._rules.get(rule.name), algorithm_of(rule.config.limit)
            if found is not None:  # only then: it is a reference cycle
                rule.register = gate.register_override
            limited = [(one, rule_limits(one.limit, algorithm)) for one in found or ()]
            rule.operator_overrides = RuleOverrides(limited, self._clock) if limited else None

    def refresh(self) -> None:
        """Reads the overrides, and applies them if they have changed."""
        with self._lock:
            if self._closed:
                return
            read = self._hash.read()
            if read != self._read:
                self._read = read
                self._rules = {}
                for one in self._decoded(read):
                    self._rules.setdefault(one.rule, []).append(one)
                for gate in list(self._gates):
                    self._apply(gate, gate.compiled)
            self._ready.set()

    def try_refresh(self) -> None:
        """As `refresh`; after an error the known overrides stay. The first of several in a row is logged."""
        try:
            self.refresh()
            self._failing = False
        except Exception as error:
            if not self._failing and not self._closed:
                text = "run-time overrides can't be read from the store (%s); those read before stay in force"
                log.warning(text, error)
            self._failing = True

    def _decoded(self, read: dict[str, str]) -> list[OperatorOverride]:
        found = []
        for field, text in read.items():
            try:
                one = OperatorOverride(*json.loads(field), **json.loads(text))
                if list(map(type, one)) != FIELD_TYPES:
                    raise TypeError(f"fields of other types than expected: {text:.200}")
                limits_of(one.limit)
                found.append(one)
            except (ValueError, TypeError, RecursionError) as error:  # written by another version of this package
                self.callback_errors.report("an override of operators is skipped: %s", error)
        return found

    # Changing --------------------------------------------------------------------------------------------------

    def all(self) -> list[OperatorOverride]:
        """The overrides that hold now, as the store has them; expired ones are removed from it."""
        now_us, found = self._clock.now_us(), []
        for one in self._decoded(self._hash.read()):
            if one.holds(now_us):
                found.append(one)
            else:
                self._hash.write(json.dumps([one.rule, one.key]), None)
        return sorted(found)

    def find(self, rule: str, key: str) -> OperatorOverride | None:
        """The override of exactly this key or pattern."""
        key = key if ANY in key else hash_long(key)
        return next((one for one in self.all() if (one.rule, one.key) == (rule, key)), None)

    def put(
        self, rule: str, key: str, limit: str, *, for_us: int | None = None, reason: str = "", by: str = ""
    ) -> OperatorOverride:
        """Sets the limit of a key or pattern, for `for_us` (None: until it is removed). InvalidLimit for a limit that is none,
        ConfigurationError for another mistake."""
        if len(limit) > MAX_LIMIT:
            raise InvalidLimit(
                f"limit: expected at most {MAX_LIMIT} characters, got {len(limit)}; a few limits suffice for a key"
            )
        if limits_of(limit) is None:
            raise InvalidLimit("limit is missing; write 'token bucket 5/s burst 10', 'unlimited' or 'blocked'")
        with self._lock:
            rules = [one for gate in self._gates for one in gate.compiled.rules if one.name == rule]
        if any(one.config.capacity is not None for one in rules):
            raise ConfigurationError(f"the rule {rule!r} has a capacity, no limits of keys; override the key in another rule")
        if ANY in key and (key.count(ANY) > MAX_STARS or len(key) > MAX_KEY_LENGTH):
            raise ConfigurationError(f"a pattern has at most {MAX_STARS} '*' and {MAX_KEY_LENGTH} characters, got {key[:60]!r}")
        for counted in [counted_key(one, key) for one in rules]:
            if counted != key:
                raise ConfigurationError(f"no request has the key {key!r}; write {counted!r}")
        if for_us is not None and not 0 < for_us <= MAX_DURATION_US:
            remedy = "write a duration such as 1h, or none: until it is removed"
            raise ConfigurationError(f"an override lasts at most 366 days, got {min(for_us, 10**18) / 1e6:g} s; {remedy}")
        key = key if ANY in key else hash_long(key)
        present = {(one.rule, one.key) for one in self.all()}
        if len(present) >= MAX_OVERRIDES and (rule, key) not in present:
            raise ConfigurationError(f"there are {MAX_OVERRIDES} overrides; remove some, or write them into the policy")
        now_us = self._clock.now_us()
        until_us = 0 if for_us is None else now_us + for_us
        one = OperatorOverride(rule, key, limit.strip(), until_us, reason[:MAX_REASON], by, now_us)
        fields = one._asdict()
        del fields["rule"], fields["key"]
        self._hash.write(json.dumps([rule, key]), json.dumps(fields))
        self.refresh()
        return one

    def remove(self, rule: str, key: str) -> bool:
        """Removes an override; False: there was none."""
        key = key if ANY in key else hash_long(key)
        if (rule, key) not in {(one.rule, one.key) for one in self.all()}:
            return False
        self._hash.write(json.dumps([rule, key]), None)
        self.refresh()
        return True

    def close(self) -> None:
        """Reads no more."""
        self._closed = True
        _polled.discard(self)


class OverridesThread(PeriodicThread):
    """Reads the hashes of all stores of this process."""

    def work(self, woken: bool) -> None:
        with suppress(RuntimeError):  # a store was opened meanwhile, which wakes this thread again
            for one in list(_polled):
                one.try_refresh()


_polled: WeakSet[OperatorOverrides] = WeakSet()
_threads: list[OverridesThread] = []


def _poll(overrides: OperatorOverrides) -> None:
    _polled.add(overrides)
    if not _threads:
        _threads.append(OverridesThread("limitkeeper operator overrides", INTERVAL_US))
    _threads[0].wake()


def overrides_in(hash: StoreHash | None, clock: Clock) -> OperatorOverrides:
    """The overrides that a hash holds; those of a store without hashes stay in this gate."""
    return OperatorOverrides(MemoryHash() if hash is None else hash, clock)
