"""Test files of policies: requests with their expected outcome, for `limitkeeper policy test`.

    policy: limitkeeper.yaml
    tests:
      - name: a user checks out ten times at once
        steps:
          - {request: POST /checkout user=42, times: 10}                                   # expected: allowed
          - {request: POST /checkout user=42, refused_by: checkout, status: 429, retry_after: 200ms}
          - {wait: 200ms}
          - POST /checkout user=42

Each test starts with an empty memory store at time 0 and runs the policy's real rules on a manual clock, so that nothing sleeps
and times are exact. An invalid test file and a failed step are both diagnostics with a position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError, InvalidLimit
from ..rate import duration_us, period_text
from ..stores import MemoryStore
from ..testing import ManualClock
from .application_overrides import HashOverrides
from .evaluation import Evaluation
from .gate import Gate
from .model import Policy, RetryAfter, Rule
from .one_line_request import parse_request
from .reading.diagnostics import INVALID, Invalid, ParseContext, ParseError, TooManyErrors, did_you_mean, split_remedy
from .reading.load import examine, open_source, parse_source
from .reading.nodes import Node, find_position
from .reading.validators import AnyOf, Duration, Field, Fields, Integer, ListOf, ParsedFields, Text, is_number
from .refusal import PENALTY_BOX
from .settlement import NOT_SENT

NEVER = "never"


@dataclass(frozen=True)
class Step:
    """One step. `node` is the request line, or the duration of a wait; `source` the whole step. What is not None is expected of
    each of the `times` requests. `response` is the status that the application answers with, for rules that charge by it."""

    node: Node
    source: Node
    wait_us: int | None = None
    times: int = 1
    refused_by: tuple[str, ...] = ()
    status: int | None = None
    retry_after: int | str | None = None
    response: int = 200

    @property
    def refused(self) -> bool:
        return bool(self.refused_by) or self.status is not None or self.retry_after is not None


@dataclass(frozen=True)
class PolicyTest:
    """A test: its name and its steps."""

    name: str
    steps: tuple[Step, ...]


@dataclass
class PolicyTestRun:
    """The tests of a file that have run, none if it has errors, and those that failed; `context` has a diagnostic for each failed
    step, up to 100, after which no further test runs."""

    context: ParseContext
    tests: tuple[PolicyTest, ...] = ()
    failed: list[PolicyTest] = field(default_factory=list)


# Reading -----------------------------------------------------------------------------------------------------------------------


def parse_retry(value: Any) -> int | str:
    try:
        return NEVER if value == NEVER else duration_us(value)
    except (InvalidLimit, ValueError, OverflowError):
        raise ParseError(f"expected a duration or never, got {value!r}", "write it like 200ms, 30s or never") from None


class NodeText(Text[Any]):
    """A string, as its node: its text is parsed when the policy is known."""

    def parse(self, node: Node, context: ParseContext) -> Node | Invalid:
        return INVALID if super().parse(node, context) is INVALID else node


def build_step(fields: ParsedFields, context: ParseContext) -> Step | Invalid:
    others = [name for name in fields.node.entries if name != "wait"]
    if "wait" in fields and others and "request" not in fields:
        return context.error(fields.key(others[0]), f"a wait has no {others[0]!r}", "write it beside a request", others[0])
    if not fields.valid():
        return INVALID
    if "wait" in fields:
        return Step(fields.at("wait"), fields.node, fields["wait"])
    return Step(fields["request"], fields.node, **{name: value for name, value in fields.values.items() if name != "request"})


REQUEST = NodeText("a request", str, "POST /checkout user=42")
NAME = Text("a name", str, "checkout", loose=True)
RETRY = Text("a duration or never", parse_retry, "200ms", accepts=is_number, convert=parse_retry)
STEP = Fields(
    "step",
    {
        "request": Field(REQUEST, "The request, as in `policy explain`."),
        "wait": Field(Duration("1us", "366d"), "Moves the clock."),
        "times": Field(Integer("a number of requests", 1, 100_000), "How many of these requests; default 1."),
        "refused_by": Field(ListOf(NAME, "a rule, or a list of rules"), "Rules that refuse it; default: it is allowed."),
        "status": Field(Integer("a status", 400, 599), "The status of the refusal."),
        "retry_after": Field(RETRY, "The exact time to retry of the refusal, before it is rounded up and spread."),
        "response": Field(Integer("a status", 100, 599), "The status that the application answers with; default 200."),
    },
    build_step,
    one_of=("request", "wait"),
)
STEPS = ListOf(
    AnyOf("a step", scalar=REQUEST.map(lambda node: Step(node, node)), mapping=STEP),
    "a list of steps",
    maximum=10_000,
    single=False,
)
TEST = Fields(
    "test",
    {"name": Field(NAME, "What is tested.", True), "steps": Field(STEPS, "Requests and waits, in order.", True)},
    lambda fields, context: PolicyTest(fields["name"], fields["steps"]),
)
FILE: Fields[ParsedFields] = Fields(
    "policy test",
    {
        "policy": Field(NodeText("the path of a policy file", str, "limitkeeper.yaml"), "Relative to this file.", True),
        "tests": Field(ListOf(TEST, "a list of tests", single=False), "The tests.", True),
    },
)


def load_policy(node: Node, context: ParseContext) -> Policy | Invalid:
    """The policy that a test file names; its own errors are added with their own file."""
    try:
        policy, found = examine(context.folder / Path(node.text), keys_needed=False)
    except ConfigurationError as error:
        return context.error(node.position, str(error), "write a path relative to this file", node.text)
    if policy is None:
        first = next(one for one in found.diagnostics() if one.severity == "error")
        message = f"the policy has errors; the first is at {first.location}: {first.full_message}"
        return context.error(node.position, message, f"see limitkeeper policy check {found.file}", node.text)
    return policy


# Running -----------------------------------------------------------------------------------------------------------------------


def run_policy_tests(path: str | Path) -> PolicyTestRun:
    """Reads a test file and runs its tests. Raises ConfigurationError only for a file that can't be read."""
    data, context = open_source(path, "policy test")
    run = PolicyTestRun(context)
    found = parse_source(data, FILE, context)
    try:
        policy = INVALID if found is INVALID or "policy" not in found.values else load_policy(found["policy"], context)
        if found is INVALID or policy is INVALID or context.failed:
            return run
        policy = replace(policy, rules=tuple(map(tested, policy.rules)))
        tests: tuple[PolicyTest, ...] = found["tests"]
        check_steps(tests, policy, context)
        if not context.failed:
            for test in tests:
                run.tests = (*run.tests, test)
                run_test(test, policy, run)
    except TooManyErrors:
        pass
    return run


def tested(rule: Rule) -> Rule:
    """The rule with exact times to retry, and without limits from a server."""
    overrides = None if isinstance(rule.overrides, HashOverrides) else rule.overrides
    return replace(rule, retry_after=RetryAfter(), overrides=overrides)


def check_steps(tests: tuple[PolicyTest, ...], policy: Policy, context: ParseContext) -> None:
    """Reports requests that can't be parsed and rules that the policy does not have."""
    names = [*(rule.name for rule in policy.rules), PENALTY_BOX]
    for step in (step for test in tests for step in test.steps):
        for name in step.refused_by:
            if name not in names:
                position = find_position(step.source.child("refused_by"), name)
                context.error(position, f"the policy has no rule {name!r}", did_you_mean(name, names), name)
        try:
            if step.wait_us is None:
                parse_request(step.node.text, policy)
        except ConfigurationError as error:
            context.error(step.node.position, *split_remedy(error), step.node.text)


def run_test(test: PolicyTest, policy: Policy, run: PolicyTestRun) -> None:
    """Runs all steps; of a step that fails, the first request is reported."""
    clock = ManualClock()
    with Gate(policy, store=MemoryStore(clock=clock), imports=False) as gate:
        for step in test.steps:
            if step.wait_us is not None:
                clock.advance(step.wait_us / 1e6)
                continue
            wrong = [one for one in ask_all(gate, step) if one]
            if wrong:
                run.failed += [] if test in run.failed else [test]
                run.context.error(step.node.position, f"{test.name}: {wrong[0]}", text=step.node.text)


def ask_all(gate: Gate, step: Step) -> Iterator[str]:
    """Makes the requests of a step; for each what differs from the expectation, "" if nothing does."""
    for number in range(1, step.times + 1):
        evaluation = gate.ask(parse_request(step.node.text, gate.policy))
        evaluation.settle(step.response, NOT_SENT)
        wrong = difference(step, evaluation)
        yield f"request {number} of {step.times}: {wrong}" if wrong and step.times > 1 else wrong


def difference(step: Step, evaluation: Evaluation) -> str:
    """What was expected and what was found; "" if they agree."""
    refusal, rules = evaluation.refusal, refusing_rules(evaluation)
    status = None if refusal is None else refusal.status
    retry = None if refusal is None else NEVER if refusal.retry_after is None else int(refusal.retry_us)
    agrees = step.refused == (refusal is not None) and {*step.refused_by} <= {*rules}
    if agrees and step.status in (None, status) and step.retry_after in (None, retry):
        return ""
    shadows = f" (refused in shadow by {', '.join(evaluation.shadows)})" if evaluation.shadows else ""
    expected = outcome_text(step.refused, step.refused_by, step.status, step.retry_after)
    return f"expected {expected}, got {outcome_text(refusal is not None, rules, status, retry)}{shadows}"


def refusing_rules(evaluation: Evaluation) -> tuple[str, ...]:
    if evaluation.refusal is None or evaluation.refusal.reason == PENALTY_BOX:
        return () if evaluation.refusal is None else (PENALTY_BOX,)
    labels = {entry.label: entry.rule.name for entry in evaluation.entries}
    return tuple(dict.fromkeys(labels.get(label, label) for label in evaluation.refusal.violated))


def outcome_text(refused: bool, rules: tuple[str, ...], status: int | None, retry: int | str | None) -> str:
    parts = [f"refused by {', '.join(rules)}" if rules else "refused" if refused else "allowed"]
    parts += [] if status is None else [f"status {status}"]
    if retry is not None:
        after = str(retry) if isinstance(retry, str) else period_text(retry) if retry else "0s"
        parts.append(f"retry_after {after if after == NEVER or after[0].isdigit() else f'1{after}'}")
    return ", ".join(parts)
