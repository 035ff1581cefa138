"""Refusals in the log, sampled: under attack a line for each of them would be the second outage.

`log_refusals(gate)` listens to the gate's events. For every kind of event and every rule, limitkeeper's own token bucket says
whether a line is written; the next one that is says how many were left out. A line is one sentence for people, and carries a
plain mapping (`record.limitkeeper`) for machines; `JsonFormatter` writes both as one line of JSON. A key is shown as its keyed
hash, the same that the list of offenders shows.

    {"time": "2026-01-10T12:00:00.000+00:00", "level": "WARNING", "logger": "limitkeeper.refusals", "message": "shop:
    'checkout' …",
     "event": "refused", "policy": "shop", "rule": "checkout", "key": "3f1c8e0a9b2d", "retry_after": 1, "suppressed": 41}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from math import isfinite
from typing import Any

from ..algorithms.claim import NamedLimit
from ..algorithms.limit import Limit
from ..algorithms.limit_parser import parse_limit
from ..clock import Clock
from ..errors import ConfigurationError
from ..stores.memory import MemoryStore
from .events import ALERT, REFUSED, RELOAD_REFUSED, SHADOW, SHUT_OUT, STORE_FAILED, Event
from .key_hash import KeyHash

#: What is written down, and never below which level.
LEAST = {REFUSED: 0, SHADOW: 0, ALERT: 0, SHUT_OUT: 0, STORE_FAILED: logging.ERROR, RELOAD_REFUSED: logging.ERROR}
#: Kinds by rule that are counted at the same time; a policy has far fewer.
MOST = 100_000

Record = dict[str, Any]


def log_refusals(
    gate: Any,
    rate: str | Limit = "1/s burst 5",
    *,
    logger: logging.Logger | str = "limitkeeper.refusals",
    level: int = logging.WARNING,
    secret: str | bytes | None = None,
    show_keys: bool = False,
    clock: Clock | None = None,
) -> Callable[[], None]:
    """Writes what the gate refuses to a logger: at most `rate` lines for each rule and kind of event; call what is returned to
    stop. `secret` is the gate's own unless given. A store that fails and a refused reload are errors; a refusal is not."""
    events = getattr(gate, "events", None)
    if events is None or REFUSED not in events.kinds:
        raise ConfigurationError(f"{gate!r} refuses nobody: give a Gate (a middleware has it as `.gate`)")
    secret = getattr(gate, "secret", None) if secret is None else secret
    lines = SampledLog(
        logging.getLogger(logger) if isinstance(logger, str) else logger,
        level,
        parse_limit(rate) if isinstance(rate, str) else rate,
        str if show_keys else KeyHash(secret),
        clock,
    )
    stops = [events.on(kind, lines.hear) for kind in LEAST if kind in events.kinds]

    def stop() -> None:
        for each in stops:
            each()

    return stop


class SampledLog:
    """Decides which events become lines. No lock: who is left out draws a number from an iterator, and the next line takes the
    iterator away to see how far it came (who holds it just then may be missed)."""

    def __init__(
        self, logger: logging.Logger, level: int, limit: Limit, shown: Callable[[str], str], clock: Clock | None
    ) -> None:
        self.logger = logger
        self.level = level
        self.shown = shown
        self.named = NamedLimit("limitkeeper.logs", "lines", limit)
        self.store = MemoryStore(max_keys=MOST) if clock is None else MemoryStore(max_keys=MOST, clock=clock)
        self.store.register(self.named)
        self.left_out: dict[str, count[int]] = {}

    def hear(self, event: Event) -> None:
        level = max(self.level, LEAST[event.kind])
        if not self.logger.isEnabledFor(level):
            return
        for rule, key, retry_after in told_by(event):
            suppressed = self._suppressed(event.kind, rule)
            if suppressed is not None:
                self._write(level, record_of(event, rule, None if key is None else self.shown(key), retry_after, suppressed))

    def _suppressed(self, kind: str, rule: str) -> int | None:
        """How many were left out since the last line; None: this one is left out too."""
        which = f"{kind}: {rule}"
        if self.store.decide_one(self.named, which, 1, 0, True):
            drawn = self.left_out.pop(which, None)
            return 0 if drawn is None else next(drawn)
        if len(self.left_out) < MOST:
            next(self.left_out.setdefault(which, count()))
        return None

    def _write(self, level: int, record: Record) -> None:
        self.logger.log(level, "%s", sentence(record), extra={"limitkeeper": record})


# What an event tells ---------------------------------------------------------------------------------------------


def told_by(event: Event) -> Iterator[tuple[str, str | None, float | None]]:
    """(rule, key, seconds to wait) of everything that an event tells; the rule is "" where it is about no rule."""
    passage = event.decision
    refusal = getattr(passage, "refusal", None)
    if event.kind == REFUSED and refusal is None and passage is not None:  # a limiter's own event
        yield passage.name, event.key if isinstance(event.key, str) else None, passage.retry_after
    elif event.kind == REFUSED and refusal is not None:
        rule = "" if refusal.rule is None else refusal.rule.name
        yield rule, key_of(passage, rule), refusal.retry_after
    elif event.kind == SHADOW:
        for rule in passage.shadows:
            yield rule, key_of(passage, rule), None
    elif event.kind == ALERT:
        for rule in alerted(passage):
            yield rule, key_of(passage, rule), None
    elif event.kind == SHUT_OUT and passage is not None:
        yield "", shut_out_key(passage), None
    else:
        key = event.key[0] if isinstance(event.key, tuple) and len(event.key) == 1 else event.key
        yield "", key if isinstance(key, str) else None, None


def key_of(passage: Any, rule: str) -> str | None:
    """The key that a rule had for this request; rules in shadow were asked on their own."""
    for entry, key in zip(passage.entries, passage.keys, strict=False):
        if entry.rule.name == rule:
            return str(key)
    for clause, claims, _ in passage.shadow or ():
        if clause.name == rule:
            return str(claims[0].key)
    return None


def shut_out_key(passage: Any) -> str | None:
    """Who is shut out: the key of a rule that counts by the same; another rule's key would be somebody else's name."""
    said = passage.policy.penalty_box
    for entry, key in zip(passage.entries, passage.keys, strict=False):
        if said is not None and entry.rule.key == said.key:
            return str(key)
    return None


def alerted(passage: Any) -> list[str]:
    """The rules of this request whose key has just crossed the alert mark; not those that were beyond it before."""
    parts = () if passage.decision is None else passage.decision.decisions
    found: dict[str, None] = {}
    for entry, part, cost in zip(passage.entries, parts, passage.costs or (), strict=False):
        mark = entry.rule.alert
        used = part.limit - part.remaining
        if mark is not None and used - cost < part.limit * mark <= used:
            found[entry.rule.name] = None
    return list(found) or [""]


def record_of(event: Event, rule: str, key: str | None, retry_after: float | None, suppressed: int) -> Record:
    """The plain mapping of a line: nothing in it that JSON can't say."""
    refusal = getattr(event.decision, "refusal", None)
    found: Record = {"event": event.kind, "policy": event.limiter, "rule": rule or None, "key": key}
    if refusal is not None:
        found |= {"reason": refusal.reason, "status": refusal.status}
    found["retry_after"] = retry_after if retry_after is not None and isfinite(retry_after) else None
    if event.error is not None:
        found["error"] = f"{type(event.error).__name__}: {event.error}"
    found["suppressed"] = suppressed
    return {name: value for name, value in found.items() if value is not None}


SENTENCES = {
    REFUSED: "refused",
    SHADOW: "would be refused (the rule is in shadow)",
    ALERT: "has spent up to the alert mark",
    SHUT_OUT: "is shut out",
    STORE_FAILED: "the store failed",
    RELOAD_REFUSED: "the new policy is refused, the old one stays",
}


def sentence(record: Record) -> str:
    """A line for people."""
    words = [f"{record['policy']}:"]
    if "rule" in record:
        words.append(f"{record['rule']!r}:")
    if "key" in record:
        words.append(f"key {record['key'] if record['key'].isalnum() else ascii(record['key'])}")
    words.append(SENTENCES[record["event"]])
    if "retry_after" in record:
        words.append(f"for {record['retry_after']:g} s")
    if "error" in record:
        words.append(f"({' | '.join(record['error'].split(chr(10)))})")
    if record["suppressed"]:
        words.append(f"[{record['suppressed']} more since the last line]")
    return " ".join(words)


class JsonFormatter(logging.Formatter):
    """Every record as one line of JSON: time, level, logger, message, and what `log_refusals` knows."""

    def format(self, record: logging.LogRecord) -> str:
        line: Record = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        more = getattr(record, "limitkeeper", None)
        if isinstance(more, dict):
            line.update(more)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)
