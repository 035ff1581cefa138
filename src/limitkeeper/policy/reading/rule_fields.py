"""Fields of a rule under `limits:`: the validator of each, among them `match`, `when` and `key`, which other sections share.

`RULE` gives the parsed fields; `assembly` makes the rule of them once the identities are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ...algorithms import TokenBucket
from ...algorithms.limit import Limit
from ...algorithms.sliding_log import SlidingWindowLog
from ...rate import Rate
from ..application_overrides import together
from ..model import SHARE, SKIP, Capacity, Charge, Cost, Limits, Match, Once, OnFailure, OnRefusal, Overrides, RetryAfter, When
from . import value_parsers as parsers
from .diagnostics import INVALID, ParseContext, ParseError, bounded_text
from .identities import CALLABLE, IDENTITY_NAME, header_field
from .nodes import ListNode, MappingNode, Node
from .validators import (
    AnyOf,
    Boolean,
    Choice,
    Duration,
    Field,
    Fields,
    Integer,
    ListOf,
    ParsedFields,
    Text,
    Url,
    Validator,
    as_pairs,
    is_a,
    is_number,
)

MAX_COST = 1_000_000_000
#: After so long a request no longer counts as concurrent, should its end never be known.
HOLD_US = 60_000_000
STRING = Text("a string", bounded_text, loose=True)
METHODS = ListOf(Text("a method", parsers.parse_methods, "GET, HEAD"), "methods").map(lambda sets: frozenset[str]().union(*sets))
HOST = Text("a host", parsers.parse_host, "api.example.com")
PATH = Text("a path", parsers.parse_path, "/checkout")
PATHS = ListOf(PATH, "a path, or a list of them")
MATCH = Fields(
    "match",
    {
        "methods": Field(METHODS, "HTTP methods; default: all. GET includes HEAD."),
        "path": Field(PATH, "A path: literal segments, {name} or * for one segment, ** at the end for any rest."),
        "host": Field(HOST, "The request's host; *.example.com for subdomains."),
    },
    lambda fields, context: Match(**fields.values),
    example="POST /checkout",
).or_else("a match", scalar=Text("a match", parsers.parse_match, "POST /checkout", accepts=is_a(Match)))
MATCHES = ListOf(MATCH, "a match, or a list of them")
NAMES = ListOf(IDENTITY_NAME, "an identity, or a list of them")


def _when(fields: ParsedFields, context: ParseContext) -> When:
    equals = tuple((name, values) for name, values in fields.values.items() if name not in ("present", "absent"))
    return When(fields.get("present", ()), fields.get("absent", ()), equals)


WHEN = Fields(
    "when",
    {
        "present": Field(NAMES, "Identities that must be present (a default counts)."),
        "absent": Field(NAMES, "Identities that must be absent."),
    },
    _when,
    others=ListOf(STRING, "a value, or a list of them"),
    key=IDENTITY_NAME,
    minimum=1,
    example="{present: partner}",
)
KEY = AnyOf(
    "a key",
    scalar=Text("a key", parsers.parse_key, "user | ip"),
    items=ListOf(Text("an identity", parsers.parse_alternatives, "user | ip"), "parts of a key", single=False),
)


def limits_by(algorithm: str = TokenBucket.kind) -> AnyOf[Limits]:
    """A limit or a list of them; `algorithm` is that of a rate alone."""
    parser = partial(parsers.parse_limits, default=algorithm)
    text = Text("a limit", parser, "token bucket 5/s burst 10", accepts=is_a(Limit), convert=lambda one: (one,))
    items = ListOf(text, "a list of limits", single=False).map(together)
    return AnyOf("a limit", scalar=text, items=items)


LIMITS = limits_by()


class InheritingLimits(Validator[Node]):
    """Limits of an override, which have the algorithm of their rule: `assembly` parses them when it is known."""

    schema = LIMITS.schema
    example = LIMITS.example

    def parse(self, node: Node, context: ParseContext) -> Node:
        return node


TIERS: Fields[ParsedFields] = Fields(
    "limit by identity",
    {
        "by": Field(replace(IDENTITY_NAME, example="plan"), "The identity whose value selects.", True),
        "default": Field(LIMITS, "For values that are not listed; default: the limit of the identity's default."),
    },
    others=LIMITS,
    key=STRING,
)
LIMIT: AnyOf[Limits | ParsedFields] = AnyOf("a limit", scalar=LIMITS.scalar, items=LIMITS.items, mapping=TIERS)
KEY_PART: Text[str | None] = Text("a string", bounded_text, accepts=lambda value: value is None, loose=True)


class OverrideEntry(NamedTuple):
    """The limits of one key, in parts (None where a part is absent), with the nodes of both."""

    parts: tuple[str | None, ...]
    key_node: Node
    limit_node: Node
    limits: Limits = ()


OVERRIDE_ENTRY = Fields(
    "override",
    {
        "key": Field(ListOf(KEY_PART, "a key, or a list of its parts"), "The key, or a list of its parts.", True),
        "limit": Field(InheritingLimits(), "The limit of this key; without an algorithm, the rule's.", True),
    },
    lambda fields, context: OverrideEntry(fields["key"], fields.at("key"), fields["limit"]),
    example="{key: [acme, 42], limit: 100/s}",
)
OVERRIDE_LIST = ListOf(OVERRIDE_ENTRY, "a list of overrides", single=False, maximum=10_000)
OVERRIDE = Fields(
    "override",
    {},
    lambda fields, context: tuple(OverrideEntry((key,), *nodes) for key, nodes in fields.node.entries.items()),
    others=InheritingLimits(),
    minimum=1,
    example="{acme-corp: token bucket 500/s burst 1000}",
).or_else("a mapping of keys to limits", items=OVERRIDE_LIST)


REDIS_URL = Url("a URL", parsers.parse_redis_url, "redis://localhost:6379")
OVERRIDES: AnyOf[Overrides | ParsedFields] = Fields(
    "overrides",
    {
        "call": Field(CALLABLE, "A callable that takes the key and returns a limit, a string or None."),
        "keep": Field(Duration("0s", "1d"), "How long its result is cached; default 10s."),
        "redis_hash": Field(Text("the name of a hash", bounded_text, "shop:limits"), "A Redis hash of key → limit."),
        "url": Field(REDIS_URL, "Its server; default: the policy's store."),
        "refresh": Field(Duration("100ms", "1d"), "How often the hash is read; default 5s."),
    },
    one_of=("call", "redis_hash"),
    unknown="write limits of single keys under 'override': {acme-corp: 100/s}",
    example="{redis_hash: shop:limits}; limits of single keys go under 'override'",
).or_else(
    "a source of limits",
    accepts=lambda value: callable(getattr(value, "get", None)) and callable(getattr(value, "close", None)),
)
UNITS = Integer("units", 1, MAX_COST)
COST_OPTIONS = (("estimate", ("response",)), ("default", ("header", "query", "call")), ("max", ("header", "query", "call")))


def _cost(fields: ParsedFields, context: ParseContext) -> Cost:
    for option, sources in COST_OPTIONS:
        if option in fields and not any(source in fields for source in sources):
            context.error(fields.key(option), f"{option!r} belongs to {' or '.join(sources)}", "remove it", option)
    if "response" in fields:
        return Cost("response", fields.get("estimate", 1), per=fields.get("response", 1))
    default, maximum = fields.get("default", 1), fields.get("max", MAX_COST)
    if "call" in fields:
        return Cost("call", default, most=maximum, call=fields.get("call"))
    if "header" in fields:
        return Cost("header", default, fields.get("header", "").lower(), maximum)
    return Cost("query", default, fields.get("query", ""), maximum)


SIZE = Text("a size", parsers.parse_size, "1kB", numbers={"type": "integer", "minimum": 1, "maximum": 10**12})
CONSTANT_COST = Integer("a cost", 1, MAX_COST).map(lambda units: Cost("constant", units))
COST = Fields(
    "cost",
    {
        "header": header_field("A header with an integer.", "X-Cost"),
        "query": Field(Text("a name", bounded_text, "n"), "A query parameter with an integer."),
        "response": Field(SIZE, "One unit per so many bytes of the response."),
        "call": Field(CALLABLE, "A callable that takes the request context and returns an integer."),
        "default": Field(Integer("units", 0, MAX_COST), "The cost when the request gives none; default 1."),
        "max": Field(UNITS, "The maximum cost."),
        # with 0 no request would ever be refused
        "estimate": Field(UNITS, "Charged before the response is known; default 1."),
    },
    _cost,
    one_of=("header", "query", "response", "call"),
).or_else("a cost", scalar=CONSTANT_COST, accepts=callable, convert=lambda call: Cost("call", call=call))
STATUS_NUMBERS = {"type": "integer", "minimum": 100, "maximum": 599}
STATUSES = ListOf(Text("a status", parsers.parse_statuses, "401 or 4xx", numbers=STATUS_NUMBERS), "statuses")
CHARGE = Fields(
    "charge",
    {
        "status": Field(STATUSES, "Only responses with these statuses are charged: 401, 4xx, 400-499."),
        "call": Field(CALLABLE, "A callable that takes status and request context and returns whether to charge."),
    },
    lambda fields, context: Charge(fields.get("status", ()), fields.get("call")),
    one_of=("status", "call"),
    example="{status: [401, 403]}",
).or_else("a charge", accepts=callable, convert=lambda call: Charge(call=call))


def _once(fields: ParsedFields, context: ParseContext) -> Once:
    header = str(fields.get("header", "idempotency-key")).lower()
    return Once(header, fields.get("for", 86_400_000_000), fields.get("replays", 10), fields.get("bind", ()))


ONCE_HEADER = Text("the name of a header", lambda text: Once(parsers.parse_header_name(text).lower()), "Idempotency-Key")
ONCE = Fields(
    "once",
    {
        "header": header_field("Requests with the same value are charged once.", "Idempotency-Key"),
        "for": Field(Duration("1s", "7d"), "How long a value is remembered; default 24h."),
        "replays": Field(Integer("repetitions", 1, 1_000_000), "How many repetitions are free; default 10."),
        "bind": Field(NAMES, "Identities that must be the same too, besides method and path."),
    },
    _once,
).or_else("the name of a header", scalar=ONCE_HEADER)
ON_REFUSAL = Text(
    "an action",
    parsers.parse_on_refusal,
    "reject, wait up to 200ms, degrade <handler> or shadow",
    accepts=lambda value: callable(value) or isinstance(value, OnRefusal),
    convert=lambda value: value if isinstance(value, OnRefusal) else OnRefusal("degrade", handler=value),
)
RETRY_AFTER = Text("a spread of retries", parsers.parse_retry_after, "spread 60s", accepts=is_a(RetryAfter))
ON_FAILURE = Text("an action", parsers.parse_on_failure, "open, closed or local 1/4", accepts=is_a(OnFailure))


class Body(Validator[object]):
    """The body of a refusal: any JSON value whose strings hold only known placeholders."""

    schema: Mapping[str, object] = {}
    scalar: Text[object] = Text(
        "a JSON value",
        lambda text: parsers.parse_message(text, (*parsers.PLACEHOLDERS, "message")),
        accepts=lambda value: value is None or isinstance(value, (int, float)),
    )

    def parse(self, node: Node, context: ParseContext) -> object:
        if isinstance(node, MappingNode):
            fields = {key: self.parse(item, context) for key, (_, item) in node.entries.items()}
            return INVALID if INVALID in fields.values() else fields
        if isinstance(node, ListNode):
            values = [self.parse(item, context) for item in node.items]
            return INVALID if INVALID in values else values
        return self.scalar.parse(node, context)


def _check_fraction(value: float) -> float:
    if not 0.01 <= value <= 1:
        remedy = f"write {value:g}%" if 1 < value <= 100 else "write it like 80%"
        raise ParseError(f"{value!r} is not between 1% and 100%", remedy)
    return float(value)


ALERT = Text(
    "a percentage",
    parsers.parse_percent,
    "80%",
    accepts=is_number,
    convert=_check_fraction,
    numbers={"type": "number", "minimum": 0.01, "maximum": 1},
)
PROBLEM = Field(Boolean(), "Refusals are application/problem+json.")


PLACES = Integer("requests at a time", 1, 1_000_000)
CONCURRENT = Fields(
    "concurrent",
    {
        "max": Field(PLACES, "Requests of a key at a time.", True),
        "hold": Field(Duration("1s", "1d"), "A request that takes longer no longer counts; default 1min."),
    },
    lambda fields, context: SlidingWindowLog(Rate(fields["max"], fields.get("hold", HOLD_US))),
    example="40",
).or_else("a number of requests", scalar=PLACES.map(lambda most: SlidingWindowLog(Rate(most, HOLD_US))), accepts=is_a(Limit))
RATE = Text("a rate", parsers.parse_rate_alone, "350/s", accepts=is_a(Rate))
CAPACITY = Fields(
    "capacity",
    {
        "rate": Field(RATE, "What all keys together may use.", True),
        "window": Field(Duration("1ms", "1d"), "How much of it, and of each guarantee, is saved up; default 1s."),
    },
    lambda fields, context: Capacity(fields["rate"], fields.get("window", 1_000_000)),
    example="350/s",
).or_else("a rate", scalar=RATE.map(Capacity), accepts=is_a(Capacity))
GUARANTEE = Fields("guarantee", {}, as_pairs, others=RATE, key=STRING, minimum=1, example="{acme: 200/s}")
SHARES = Fields("share", {}, as_pairs, others=Integer("a weight", 1, 1000), key=STRING, minimum=1, example="{acme: 3}")
SAFE_CONCURRENCY = Field(Integer("concurrent requests", 1, 1_000_000), "Of one instance; larger bursts give a warning.")
RULE_NAME = Text("a name", parsers.parse_rule_name, "checkout", loose=True, texts=parsers.RULE_NAMES)
MESSAGE_TEXT = Text("a message", parsers.parse_message, '"Too many. Retry after {retry_after}s."')
MESSAGE_CALL = Field(CALLABLE, "A callable that takes the refusal and the request context and returns the message.", True)
MESSAGE = Fields("message", {"call": MESSAGE_CALL}, lambda fields, context: fields["call"]).or_else(
    "a message", scalar=MESSAGE_TEXT, accepts=callable
)
RULE: Fields[ParsedFields] = Fields(
    "rule",
    {
        "name": Field(RULE_NAME, "The unique name of the rule: in headers, in metrics, in the store.", True),
        "description": Field(Text("a string", str), "A comment."),
        "match": Field(MATCHES, "Which requests: POST /checkout, a list, or {methods, path, host}. Default: all."),
        "when": Field(WHEN, "A condition on the identities."),
        "key": Field(KEY, "What is counted: user, user | ip, [tenant, user]. Default: all requests together."),
        "unidentified": Field(Choice(SKIP, SHARE), "Requests without any part of the key: not limited, or one shared key."),
        "limit": Field(
            LIMIT,
            "token bucket 5/s burst 10; several with ';'; unlimited; or a mapping by identity.",
            True,
            unless=("concurrent", "capacity"),
        ),
        "concurrent": Field(CONCURRENT, "Requests of a key at a time, besides the limit or alone; 503 when there are more."),
        "capacity": Field(
            CAPACITY, "One rate for all keys together, divided among those that ask: 350/s. 503 when it is used up."
        ),
        "guarantee": Field(GUARANTEE, "What single keys get of the capacity, whatever the others send: {acme: 200/s}."),
        "share": Field(SHARES, "Weights of single keys in the division of the rest: {acme: 3}; default 1."),
        "override": Field(OVERRIDE, "Limits of single keys."),
        "overrides": Field(OVERRIDES, "A source of limits of single keys at run time."),
        "cost": Field(COST, "The cost of a request; default 1."),
        "charge": Field(CHARGE, "Which responses are charged; default: all."),
        "once": Field(ONCE, "Requests with the same value of this header are charged once."),
        "on_refusal": Field(ON_REFUSAL, "reject | wait up to 200ms [queue 100] [per client 25] | degrade <handler> | shadow"),
        "on_failure": Field(ON_FAILURE, "open | closed | local 1/4: the decision when the store fails."),
        "status": Field(Integer("a status", 400, 599), "The status of a refusal; default 429."),
        "message": Field(
            MESSAGE, "The message of a refusal; may hold {retry_after}, {limit}, {remaining}, {rule}; or {call: …}."
        ),
        "body": Field(Body(), "Sent instead of code and message."),
        "problem": PROBLEM,
        "retry_after": Field(RETRY_AFTER, "spread 60s: Retry-After of refused clients is spread over an interval."),
        "priority": Field(Integer("a priority", -1_000_000, 1_000_000), "Of several refusals the highest is answered."),
        "criticality": Field(
            Text("a class", bounded_text, "background"),
            "The class of its requests for a load shedder: critical, normal, background.",
        ),
        "alert": Field(ALERT, "Event and log line when a key has used this part of its limit."),
        "safe_concurrency": SAFE_CONCURRENCY,
    },
    renamed={
        **dict.fromkeys(("shadow", "dry_run", "enabled"), "on_refusal: shadow, which counts and lets pass"),
        **dict.fromkeys(("path", "paths", "method", "methods"), "match: POST /checkout"),
        **dict.fromkeys(("rate", "burst"), "limit: token bucket 5/s burst 10"),
    },
    example="- {name: api, key: user | ip, limit: token bucket 5/s burst 10}",
)
