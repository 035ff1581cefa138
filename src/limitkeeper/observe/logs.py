"""Sampled log of refusals: under attack, one line for each refusal would be a second outage.

`log_refusals(gate)` listens to the gate's events. For every kind of event and every rule, a token bucket decides whether a line
is written; the next written line says how many were suppressed. A line is one readable sentence, and carries a plain mapping
(`record.limitkeeper`) for machines; `JsonFormatter` writes both as one line of JSON. A key is shown as its keyed hash, the same
as in the list of offenders.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count
from math import isfinite
from typing import TYPE_CHECKING, Protocol

from ..algorithms.claim import NamedLimit
from ..algorithms.limit import Limit
from ..algorithms.limit_parser import parse_limit
from ..clock import Clock
from ..errors import ConfigurationError
from ..stores.memory import MemoryStore
from .events import ALERT, PENALTY_BOX, REFUSED, RELOAD_REFUSED, SHADOW, STORE_FAILED, Event, Publisher
from .key_hash import KeyHash

if TYPE_CHECKING:
    from ..policy.evaluation import Evaluation

#: The logged kinds, and the lowest level of each.
MIN_LEVEL = {REFUSED: 0, SHADOW: 0, ALERT: 0, PENALTY_BOX: 0, STORE_FAILED: logging.ERROR, RELOAD_REFUSED: logging.ERROR}
#: Pairs of kind and rule that are sampled at the same time; a policy has far fewer.
MAX_SAMPLED = 100_000

Record = dict[str, object]


class EventSource(Protocol):
    """A Gate or a Limiter: it publishes refusals. A Gate has a `secret` too."""

    events: Publisher


def log_refusals(
    gate: EventSource,
    rate: str | Limit = "1/s burst 5",
    *,
    logger: logging.Logger | str = "limitkeeper.refusals",
    level: int = logging.WARNING,
    secret: str | bytes | None = None,
    show_keys: bool = False,
    clock: Clock | None = None,
) -> Callable[[], None]:
    """Logs the gate's refusals: at most `rate` lines for each rule and kind of event; call the returned function to stop.
    `secret` defaults to the gate's own. A store failure and a refused reload are logged as errors; a refusal is not."""
    events = getattr(gate, "events", None)
    if events is None or REFUSED not in events.kinds:
        raise ConfigurationError(f"expected a Gate (a middleware has it as `.gate`), got {gate!r}")
    secret = getattr(gate, "secret", None) if secret is None else secret
    sampled = SampledLog(
        logging.getLogger(logger) if isinstance(logger, str) else logger,
        level,
        parse_limit(rate) if isinstance(rate, str) else rate,
        str if show_keys else KeyHash(secret),
        clock,
    )
    stops = [events.on(kind, sampled.handle) for kind in MIN_LEVEL if kind in events.kinds]

    def stop() -> None:
        for each in stops:
            each()

    return stop


class SampledLog:
    """Decides which events become lines. Without a lock: a suppressed event draws a number from an iterator, and the next line
    takes the iterator away to read how many were drawn (a thread that holds it at that moment may be missed)."""

    def __init__(
        self, logger: logging.Logger, level: int, limit: Limit, show_key: Callable[[str], str], clock: Clock | None
    ) -> None:
        self.logger = logger
        self.level = level
        self.show_key = show_key
        self.limit = NamedLimit("limitkeeper.logs", "lines", limit)
        self.store = MemoryStore(max_keys=MAX_SAMPLED, clock=clock)
        self.store.register(self.limit)
        self.suppressed: dict[str, count[int]] = {}

    def handle(self, event: Event) -> None:
        level = max(self.level, MIN_LEVEL[event.kind])
        if not self.logger.isEnabledFor(level):
            return
        for rule, key, retry_after in refusals_of(event):
            suppressed = self._sample(event.kind, rule)
            if suppressed is not None:
                record = record_of(event, rule, None if key is None else self.show_key(key), retry_after, suppressed)
                self.logger.log(level, "%s", sentence(record), extra={"limitkeeper": record})

    def _sample(self, kind: str, rule: str) -> int | None:
        """How many events were suppressed since the last line; None when this one is suppressed too."""
        key = f"{kind}: {rule}"
        if self.store.decide_one(self.limit, key, 1, 0, True):
            drawn = self.suppressed.pop(key, None)
            return 0 if drawn is None else next(drawn)
        if len(self.suppressed) < MAX_SAMPLED:
            next(self.suppressed.setdefault(key, count()))
        return None


# From an event to a record -----------------------------------------------------------------------------------------


def refusals_of(event: Event) -> Iterator[tuple[str, str | None, float | None]]:
    """(rule, key, seconds to wait) of every rule that an event concerns; the rule is "" where it concerns none."""
    decided = event.decision
    refusal = getattr(decided, "refusal", None)
    if event.kind == REFUSED and refusal is None and decided is not None:  # a limiter's own event
        yield decided.name, event.key if isinstance(event.key, str) else None, decided.retry_after
    elif event.kind == REFUSED and refusal is not None:
        rule = "" if refusal.rule is None else refusal.rule.name
        yield rule, key_of(decided, rule), refusal.retry_after
    elif event.kind in (SHADOW, ALERT) and decided is not None:
        for rule in decided.shadows if event.kind == SHADOW else (decided.alerting.rule.name,):
            yield rule, key_of(decided, rule), None
    elif event.kind == PENALTY_BOX and decided is not None:
        yield "", penalty_box_key(decided), None
    else:
        key = event.key[0] if isinstance(event.key, tuple) and len(event.key) == 1 else event.key
        yield "", key if isinstance(key, str) else None, None


def key_of(evaluation: Evaluation, rule: str) -> str | None:
    """The key that a rule had for this request; rules in shadow were evaluated separately."""
    for entry, key in zip(evaluation.entries, evaluation.keys, strict=False):
        if entry.rule.name == rule:
            return key
    for compiled_rule, claims, _ in evaluation.shadow or ():
        if compiled_rule.name == rule:
            return str(claims[0].key)
    return None


def penalty_box_key(evaluation: Evaluation) -> str | None:
    """The client in the penalty box: the key of a rule with the same identity; another rule's key would name another client."""
    config = evaluation.policy.penalty_box
    for entry, key in zip(evaluation.entries, evaluation.keys, strict=False):
        if config is not None and entry.rule.key == config.key:
            return key
    return None


def record_of(event: Event, rule: str, key: str | None, retry_after: float | None, suppressed: int) -> Record:
    """The plain mapping of a line: values that JSON can represent."""
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
    PENALTY_BOX: "is in the penalty box",
    STORE_FAILED: "the store failed",
    RELOAD_REFUSED: "the new policy is refused, the old one stays",
}


def sentence(record: Record) -> str:
    """The line as a readable sentence."""
    policy = str(record["policy"])
    words = [f"{policy if policy.isprintable() else ascii(policy)}:"]
    if "rule" in record:
        words.append(f"{record['rule']!r}:")
    if "key" in record:
        key = str(record["key"])
        words.append(f"key {key if key.isalnum() else ascii(key)}")
    no_room = record["event"] == ALERT and "error" in record
    words.append("an override does not hold, the rule's own limit does" if no_room else SENTENCES[str(record["event"])])
    if "retry_after" in record:
        words.append(f"for {record['retry_after']:g} s")
    if "error" in record:
        words.append(f"({' | '.join(str(record['error']).split(chr(10)))})")
    if record["suppressed"]:
        words.append(f"[{record['suppressed']} more since the last line]")
    return " ".join(words)


class JsonFormatter(logging.Formatter):
    """Formats every record as one line of JSON: time, level, logger, message, and the fields of `log_refusals`."""

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
