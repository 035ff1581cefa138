"""Refusals in the log: sampled by rule and kind, with hashed keys, one record each, and every omitted line is counted."""

from __future__ import annotations

import io
import json
import logging
import threading
from dataclasses import replace

import pytest
from traffic import asked, failing_gate, gate_on, policy, rule

from limitkeeper import ConfigurationError, FixedWindow, InvalidLimit, Limiter, MemoryStore
from limitkeeper.observe.key_hash import KeyHash
from limitkeeper.observe.logs import JsonFormatter, log_refusals
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.model import Cost, PenaltyBoxConfig
from limitkeeper.testing import ManualClock
from stand_ins import NOON


class Kept(logging.Handler):
    """Keeps the log records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def received(self) -> list[dict[str, object]]:
        return [record.limitkeeper for record in self.records]  # type: ignore[attr-defined]


@pytest.fixture
def kept():
    """A logger of its own for each test, and its records."""
    handler = Kept()
    logger = logging.getLogger("limitkeeper.refusals.tested")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    handler.logger = logger  # type: ignore[attr-defined]
    yield handler
    logger.setLevel(logging.NOTSET)
    for each in list(logger.handlers):
        logger.removeHandler(each)


def test_a_refusal_is_one_record(kept):
    """A refused request is a record with the rule, the reason, the retry time, and the key as its keyed hash."""
    clock = ManualClock(NOON)
    gate = gate_on(clock)
    log_refusals(gate, logger=kept.logger, clock=clock)
    for _ in range(6):
        asked(gate, "/checkout")
    refused = [received for received in kept.received if received["event"] == "refused"]
    assert refused == [
        {
            "event": "refused",
            "policy": "shop",
            "rule": "checkout",
            "key": KeyHash(b"a secret of ours")("ann"),
            "reason": "quota",
            "status": 429,
            "retry_after": 60,
            "suppressed": 0,
        }
    ]
    assert gate.snapshot().offenders[0].key == refused[0]["key"]
    line = kept.records[-1].getMessage()
    assert line == f"shop: 'checkout': key {refused[0]['key']} refused for 60 s"
    assert kept.records[-1].levelno == logging.WARNING


def test_lines_are_sampled_and_the_rest_is_counted(kept):
    """A burst of five lines, then one for each second, each with the number of omitted ones since the last."""
    clock = ManualClock(NOON)
    gate = gate_on(clock)
    log_refusals(gate, "1/s burst 5", logger=kept.logger, clock=clock)
    for _ in range(3):
        for n in range(20):
            for _ in range(6):
                asked(gate, "/checkout", f"u{n}")
        clock.advance(1)
    refused = [received["suppressed"] for received in kept.received if received["event"] == "refused"]
    # 20 refusals, then 20 × 6 and again (the window of a minute is still full), of which one line each
    assert refused == [0, 0, 0, 0, 0, 15, 119]
    assert "[15 more since the last line]" in kept.records[-2].getMessage()


def test_one_rule_does_not_silence_another(kept):
    """Lines are counted for each rule and each kind of event: a flood on one leaves the others their lines."""
    clock = ManualClock(NOON)
    gate = gate_on(clock)
    log_refusals(gate, "1/min", logger=kept.logger, clock=clock)
    for _ in range(9):
        asked(gate, "/checkout")
        asked(gate, "/search")
        asked(gate, "/login", status=401)
    received = [(each["event"], each["rule"]) for each in kept.received]
    assert sorted(received) == [("alert", "checkout"), ("refused", "checkout"), ("refused", "login"), ("shadow", "trial")]


def test_the_penalty_box_and_failures_are_logged(kept):
    """A client in the penalty box, a store that fails and a refused reload have lines; the last two are errors."""
    clock = ManualClock(NOON)
    gate = gate_on(clock)
    log_refusals(gate, logger=kept.logger, level=logging.INFO, clock=clock)
    for _ in range(30):
        asked(gate, "/checkout")
    gate.reload_refused(ValueError("line 3: no such word\nline 5: what?"))
    shut = next(record for record in kept.records if record.limitkeeper["event"] == "penalty box")
    assert shut.levelno == logging.INFO
    reload = kept.records[-1]
    assert reload.levelno == logging.ERROR
    assert reload.limitkeeper["error"].startswith("ValueError: line 3")
    assert "\n" not in reload.getMessage()
    failing = failing_gate()
    log_refusals(failing, logger=kept.logger, clock=clock)
    asked(failing, "/open")
    assert kept.received[-1]["event"] == "store failed"
    assert kept.records[-1].levelno == logging.ERROR


def test_keys_are_shown_only_with_show_keys(kept):
    """With show_keys the key itself is in the record; in the message it can't break the line."""
    clock = ManualClock(NOON)
    gate = gate_on(clock)
    log_refusals(gate, logger=kept.logger, show_keys=True, clock=clock)
    for _ in range(6):
        asked(gate, "/checkout", "ann\nroot: all is well")
    assert kept.received[-1]["key"] == "ann\nroot: all is well"
    assert "\n" not in kept.records[-1].getMessage()


def test_a_name_can_not_break_the_line(kept):
    """A limiter's name is printed without control characters."""
    clock = ManualClock(NOON)
    limiter = Limiter("1/h", store=MemoryStore(clock=clock), name="mails\nroot: all is well")
    log_refusals(limiter, logger=kept.logger, clock=clock)
    for _ in range(2):
        limiter.hit("ann")
    assert "\n" not in kept.records[-1].getMessage()


def test_stopping_stops(kept):
    """Calling what `log_refusals` returns ends it, and the gate has no listener left."""
    gate = gate_on(ManualClock(NOON))
    stop = log_refusals(gate, logger=kept.logger)
    assert gate.events.wants("refused")
    stop()
    assert not gate.events
    for _ in range(6):
        asked(gate, "/checkout")
    assert kept.records == []


def test_a_logger_that_is_not_listened_to_costs_nothing(kept):
    """Below the logger's level nothing is counted and no rule's line is used up."""
    clock = ManualClock(NOON)
    gate = gate_on(clock)
    kept.logger.setLevel(logging.ERROR)
    log_refusals(gate, "1/h", logger=kept.logger, clock=clock)
    for _ in range(6):
        asked(gate, "/checkout")
    kept.logger.setLevel(logging.WARNING)
    asked(gate, "/checkout")
    assert [received["suppressed"] for received in kept.received] == [0]


def test_json_lines(kept):
    """The formatter writes one line of JSON for any record: ours with all fields, others with those they have."""
    clock = ManualClock(NOON)
    gate = gate_on(clock)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    kept.logger.addHandler(handler)
    log_refusals(gate, logger=kept.logger, clock=clock)
    for _ in range(6):
        asked(gate, "/checkout")
    try:
        raise ValueError("ü\n")
    except ValueError:
        kept.logger.exception("something else")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines[:-1]] == ["alert", "refused"]
    assert lines[1]["retry_after"] == 60
    assert lines[1]["logger"] == "limitkeeper.refusals.tested"
    assert lines[1]["time"].endswith("+00:00")
    assert lines[-1]["message"] == "something else"
    assert "ValueError" in lines[-1]["exception"]


def test_what_never_fits_is_json_too(kept):
    """A refusal without an end has no number rather than infinity: JSON has none. A plain limiter can be logged as well."""
    limiter = Limiter("5/s", store=MemoryStore(clock=ManualClock()), name="plain")
    log_refusals(limiter, logger=kept.logger)
    limiter.hit("ann", cost=6)
    assert kept.received == [{"event": "refused", "policy": "plain", "rule": "plain", "key": KeyHash()("ann"), "suppressed": 0}]
    assert "Infinity" not in JsonFormatter().format(kept.records[0])


def test_threads_write_no_more_than_the_rate(kept):
    """Threads that are refused at once write as many lines as the rate allows, and everything is either written or counted."""
    clock = ManualClock(NOON)
    gate = gate_on(clock)
    log_refusals(gate, "1/s burst 3", logger=kept.logger, clock=clock)

    def run(user: str) -> None:
        for n in range(100):
            asked(gate, "/checkout", f"{user}{n // 10}")

    threads = [threading.Thread(target=run, args=(user,)) for user in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([received for received in kept.received if received["event"] == "refused"]) == 3
    clock.advance(1)
    for _ in range(6):
        asked(gate, "/checkout", "last")
    refused = [received["suppressed"] for received in kept.received if received["event"] == "refused"]
    assert len(refused) == 4
    assert sum(refused) + 4 == 4 * 10 * 5 + 1


def test_senseless_settings_are_errors():
    """An invalid rate, and a source without refusals, are errors that name the right form."""
    with pytest.raises(InvalidLimit):
        log_refusals(gate_on(ManualClock()), "often")
    with pytest.raises(ConfigurationError, match="expected a Gate"):
        log_refusals(object())


def test_a_shadow_record_has_the_key(kept):
    """A rule in shadow is decided on its own: its line has the key all the same."""
    clock = ManualClock(NOON)
    gate = gate_on(clock)
    log_refusals(gate, logger=kept.logger, clock=clock)
    for user in ("ann", "ann", "bob"):
        asked(gate, "/search", user)
    assert [(received["rule"], received["key"]) for received in kept.received] == [("trial", KeyHash(b"a secret of ours")("ann"))]


def test_an_alert_is_of_the_rule_that_crossed(kept):
    """A rule that was already beyond its mark is not named when another one crosses its own."""
    rules = [rule("small", FixedWindow("10/min"), alert=0.5), rule("large", FixedWindow("20/min"), alert=0.4)]
    gate = Gate(policy(rules=tuple(rules)), store=MemoryStore(clock=ManualClock(NOON)))
    log_refusals(gate, logger=kept.logger, clock=ManualClock(NOON))
    for _ in range(10):
        asked(gate, "/")
    assert [(received["event"], received["rule"]) for received in kept.received] == [("alert", "small"), ("alert", "large")]


def test_an_alert_at_the_end_of_a_response_names_its_rule_and_key(kept):
    """A cost that is known when the response has ended crosses the mark: its line names who has spent so much."""
    bytes_sent = rule("bytes", FixedWindow("100/day"), cost=Cost("response", 1, per=1), alert=0.8)
    rules = (rule("other", FixedWindow("50/day"), alert=0.5), bytes_sent)
    gate = Gate(policy(rules=rules), store=MemoryStore(clock=ManualClock(NOON)), secret=b"a secret of ours")
    log_refusals(gate, logger=kept.logger, clock=ManualClock(NOON))
    asked(gate, "/")
    assert [(received["rule"], received["key"]) for received in kept.received] == [("bytes", KeyHash(b"a secret of ours")("ann"))]


@pytest.mark.parametrize(("key", "whom"), [((("user",),), "ann"), ((("ip",),), None)])
def test_the_penalty_box_names_no_other_client(kept, key, whom):
    """A client in the penalty box is named by a rule with the same key; another rule's key would name another client."""
    gate = Gate(
        replace(
            policy(rules=(rule("api", FixedWindow("1/min")),)),
            penalty_box=PenaltyBoxConfig(FixedWindow("1/min"), 60_000_000, key),
        ),
        store=MemoryStore(clock=ManualClock(NOON)),
    )
    log_refusals(gate, logger=kept.logger, clock=ManualClock(NOON), show_keys=True)
    for _ in range(4):
        asked(gate, "/")
    assert [received.get("key") for received in kept.received if received["event"] == "penalty box"] == [whom]
