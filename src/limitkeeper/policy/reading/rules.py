"""Reads one rule under `limits:`: its fields, and the rule that they define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...algorithms.limit import Limit
from ..model import SHARE, SKIP, Answer, Charge, Cost, Key, Limits, Once, OnFailure, OnRefusal, Overrides, Rule, Tiers, When
from ..overrides import CalledOverrides
from . import phrase_parsers as parsers
from .fields import Fields, FieldSpec, ParsedFields
from .identities import CALLABLE, header_field
from .limit_parser import parse_limits
from .match_and_key_fields import KEY, MATCHES, STRING, WHEN
from .nodes import ListNode, MappingNode, Node, Scalar
from .parse_context import ParseContext, ParseError, bounded_text
from .store_url import parse_redis_url
from .validators import INVALID, AnyOf, Boolean, Choice, DurationText, Integer, Invalid, Json, ListOf, Text, Url, Validator

MAX_COST = 1_000_000_000

# Limits ------------------------------------------------------------------------------------------------------------------


LIMIT_TEXT = Text(
    "a limit",
    parse_limits,
    "token bucket 5/s burst 10",
    accepts=lambda value: isinstance(value, Limit),
    convert=lambda value: (value,),
)
LIMIT_LIST = ListOf(LIMIT_TEXT, "a list of limits", single=False).map(lambda found: tuple(one for some in found for one in some))
LIMITS = AnyOf("a limit", scalar=LIMIT_TEXT, items=LIMIT_LIST)
TIERS = Fields(
    "limit by identity",
    {
        "by": FieldSpec(
            Text("an identity", parsers.parse_identity_name, "plan"), "The identity whose value selects.", required=True
        ),
        "default": FieldSpec(LIMITS, "For values that are not listed; default: the limit of the identity's default."),
    },
    lambda fields, context: fields,
    others=LIMITS,
    check_key=bounded_text,
)
LIMIT: AnyOf[Limits | ParsedFields] = AnyOf("a limit", scalar=LIMIT_TEXT, items=LIMIT_LIST, mapping=TIERS)

# Overrides ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class OverrideDraft:
    """The limits of one key, in parts, with the nodes of both."""

    parts: tuple[str | None, ...]
    limits: Limits
    key_node: Node
    limit_node: Node


class KeyPart(Validator[str | None]):
    """One part of a joined key; null where the part is absent."""

    expects = "a part of a key"

    def parse(self, node: Node, context: ParseContext) -> str | Invalid | None:
        return None if isinstance(node, Scalar) and node.value is None else STRING.parse(node, context)

    def schema(self) -> Json:
        return {"type": ["string", "number", "boolean", "null"]}


def _override_entry(fields: ParsedFields, context: ParseContext) -> OverrideDraft | Invalid:
    if "key" not in fields.values or "limit" not in fields.values:
        return INVALID
    return OverrideDraft(fields.get("key"), fields.get("limit"), fields.at("key"), fields.at("limit"))


def _override_mapping(fields: ParsedFields, context: ParseContext) -> tuple[OverrideDraft, ...] | Invalid:
    if not fields.valid(*fields.node.entries):
        return INVALID
    return tuple(OverrideDraft((key,), fields.get(key), node, at) for key, (node, at) in fields.node.entries.items())


OVERRIDE_ENTRY = Fields(
    "override",
    {
        "key": FieldSpec(ListOf(KeyPart(), "a key, or a list of its parts"), "The key, or a list of its parts.", required=True),
        "limit": FieldSpec(LIMITS, "The limit of this key.", required=True),
    },
    _override_entry,
    example="{key: [acme, 42], limit: 100/s}",
)
OVERRIDE = AnyOf(
    "a mapping of keys to limits",
    mapping=Fields(
        "override", {}, _override_mapping, others=LIMITS, minimum=1, example="{acme-corp: token bucket 500/s burst 1000}"
    ),
    items=ListOf(OVERRIDE_ENTRY, "a list of overrides", single=False, maximum=10_000),
)


def _overrides(fields: ParsedFields, context: ParseContext) -> Overrides | ParsedFields | Invalid:
    if "call" not in fields:
        return fields  # a Redis hash needs the policy's store
    call = fields.get("call")
    return INVALID if call is None else CalledOverrides(call, fields.get("keep", 10_000_000))


OVERRIDES = AnyOf(
    "overrides",
    mapping=Fields(
        "overrides",
        {
            "call": FieldSpec(CALLABLE, "A callable that takes the key and returns a limit, a string or None."),
            "keep": FieldSpec(DurationText("0s", "1d"), "How long its result is cached; default 10s."),
            "redis_hash": FieldSpec(Text("the name of a hash", bounded_text, "shop:limits"), "A Redis hash of key → limit."),
            "url": FieldSpec(Url("a URL", parse_redis_url, "redis://localhost:6379"), "Its server; default: the policy's store."),
            "refresh": FieldSpec(DurationText("100ms", "1d"), "How often the hash is read; default 5s."),
        },
        _overrides,
        one_of=("call", "redis_hash"),
    ),
    accepts=lambda value: callable(getattr(value, "get", None)) and callable(getattr(value, "close", None)),
)

# Cost, charge, once --------------------------------------------------------------------------------------------------------

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
    source = "header" if "header" in fields else "query"
    name = fields.get(source, "")
    return Cost(source, default, name.lower() if source == "header" else name, maximum)


COST = AnyOf(
    "a cost",
    scalar=Integer("a cost", 1, MAX_COST).map(lambda units: Cost("constant", units)),
    mapping=Fields(
        "cost",
        {
            "header": header_field("A header with an integer.", "X-Cost"),
            "query": FieldSpec(Text("a name", bounded_text, "n"), "A query parameter with an integer."),
            "response": FieldSpec(
                Text("a size", parsers.parse_size, "1kB", loose=True), "One unit per so many bytes of the response."
            ),
            "call": FieldSpec(CALLABLE, "A callable that takes the request context and returns an integer."),
            "default": FieldSpec(Integer("units", 0, MAX_COST), "The cost when the request gives none; default 1."),
            "max": FieldSpec(Integer("units", 1, MAX_COST), "The maximum cost."),
            "estimate": FieldSpec(  # with 0 no request would ever be refused
                Integer("units", 1, MAX_COST), "Charged before the response is known; default 1."
            ),
        },
        _cost,
        one_of=("header", "query", "response", "call"),
    ),
    accepts=callable,
    convert=lambda call: Cost("call", call=call),
)
STATUSES = ListOf(Text("a status", parsers.parse_statuses, "401 or 4xx", loose=True), "statuses")
CHARGE = AnyOf(
    "a charge",
    mapping=Fields(
        "charge",
        {
            "status": FieldSpec(STATUSES, "Only responses with these statuses are charged: 401, 4xx, 400-499."),
            "call": FieldSpec(CALLABLE, "A callable that takes status and request context and returns whether to charge."),
        },
        lambda fields, context: Charge(fields.get("status", ()), fields.get("call")),
        one_of=("status", "call"),
        example="{status: [401, 403]}",
    ),
    accepts=callable,
    convert=lambda call: Charge(call=call),
)
ONCE = AnyOf(
    "the name of a header",
    scalar=Text("the name of a header", lambda text: Once(parsers.parse_header_name(text).lower()), "Idempotency-Key"),
    mapping=Fields(
        "once",
        {
            "header": header_field("Requests with the same value are charged once.", "Idempotency-Key"),
            "for": FieldSpec(DurationText("1s", "7d"), "How long a value is remembered; default 24h."),
            "replays": FieldSpec(Integer("repetitions", 1, 1_000_000), "How many repetitions are free; default 10."),
        },
        lambda fields, context: Once(
            str(fields.get("header", "idempotency-key")).lower(), fields.get("for", 86_400_000_000), fields.get("replays", 10)
        ),
    ),
)

# Refusals ----------------------------------------------------------------------------------------------------------------

ON_REFUSAL = Text(
    "an action",
    parsers.parse_on_refusal,
    "reject, wait up to 200ms, degrade <handler> or shadow",
    accepts=lambda value: callable(value) or isinstance(value, OnRefusal),
    convert=lambda value: value if isinstance(value, OnRefusal) else OnRefusal("degrade", handler=value),
)
ON_FAILURE = Text(
    "an action", parsers.parse_on_failure, "open, closed or local 1/4", accepts=lambda value: isinstance(value, OnFailure)
)


class Body(Validator[object]):
    """The body of a refusal: any JSON value whose strings hold only known placeholders."""

    expects = "a JSON value"

    def parse(self, node: Node, context: ParseContext) -> object:
        if isinstance(node, MappingNode):
            fields = {key: self.parse(item, context) for key, (_, item) in node.entries.items()}
            return INVALID if any(value is INVALID for value in fields.values()) else fields
        if isinstance(node, ListNode):
            values = [self.parse(item, context) for item in node.items]
            return INVALID if any(value is INVALID for value in values) else values
        if not isinstance(node, Scalar) or not (node.value is None or isinstance(node.value, (str, int, float))):
            return self.reject(node, context)
        try:
            if isinstance(node.value, str):
                parsers.parse_message(node.text, (*parsers.PLACEHOLDERS, "message"))
        except ParseError as error:
            context.parse_error(node, error)
            return INVALID
        return node.value

    def schema(self) -> Json:
        return {}


def _check_fraction(value: float) -> float:
    if not 0.01 <= value <= 1:
        remedy = f"write {value:g}%" if 1 < value <= 100 else "write it like 80%"
        raise ParseError(f"{value!r} is not between 1% and 100%", remedy)
    return float(value)


ALERT = Text(
    "a percentage",
    parsers.parse_percent,
    "80%",
    accepts=lambda value: isinstance(value, float),
    convert=_check_fraction,
    loose=True,
)
PROBLEM = FieldSpec(Boolean(), "Refusals are application/problem+json.")
SAFE_CONCURRENCY = FieldSpec(Integer("concurrent requests", 1, 1_000_000), "Larger bursts give a warning.")

# The rule ----------------------------------------------------------------------------------------------------------------


class RuleDraft:
    """A rule as it is written, before the identities are known."""

    def __init__(self, fields: ParsedFields) -> None:
        self.fields = fields
        self.name: str = fields.get("name", "")
        self.key: Key = fields.get("key", ())
        self.when: When = fields.get("when", When())
        self.limit: Limits | ParsedFields | Invalid = fields.get("limit", INVALID)
        self.override: tuple[OverrideDraft, ...] = fields.get("override", ())

    def rule(
        self, limit: Limits | Tiers, overrides: Overrides | None, override: dict[str, Limits], on_failure: OnFailure
    ) -> Rule:
        """The rule; fields that are absent have their defaults."""
        get: Any = self.fields.get
        return Rule(
            self.name,
            limit,
            match=get("match", ()),
            when=self.when,
            key=self.key,
            override=tuple(override.items()),
            overrides=overrides,
            cost=get("cost", Cost()),
            charge=get("charge", Charge()),
            once=get("once"),
            on_refusal=get("on_refusal", OnRefusal()),
            on_failure=get("on_failure", on_failure),
            answer=Answer(get("status"), get("message"), get("body"), get("problem")),
            priority=get("priority", 0),
            alert=get("alert"),
            unidentified=get("unidentified", SKIP),
            description=get("description", ""),
        )


RULE_NAME = Text("a name", parsers.parse_rule_name, "checkout", loose=True)
MESSAGE = Text("a message", parsers.parse_message, '"Too many. Retry after {retry_after}s."')
RULE = Fields(
    "rule",
    {
        "name": FieldSpec(RULE_NAME, "The unique name of the rule: in headers, in metrics, in the store.", required=True),
        "description": FieldSpec(Text("a string", str), "A comment."),
        "match": FieldSpec(MATCHES, "Which requests: POST /checkout, a list, or {methods, path, host}. Default: all."),
        "when": FieldSpec(WHEN, "A condition on the identities."),
        "key": FieldSpec(KEY, "What is counted: user, user | ip, [tenant, user]. Default: all requests together."),
        "unidentified": FieldSpec(Choice(SKIP, SHARE), "Requests without any part of the key: not limited, or one shared key."),
        "limit": FieldSpec(
            LIMIT, "token bucket 5/s burst 10; several with ';'; unlimited; or a mapping by identity.", required=True
        ),
        "override": FieldSpec(OVERRIDE, "Limits of single keys."),
        "overrides": FieldSpec(OVERRIDES, "A source of limits of single keys at run time."),
        "cost": FieldSpec(COST, "The cost of a request; default 1."),
        "charge": FieldSpec(CHARGE, "Which responses are charged; default: all."),
        "once": FieldSpec(ONCE, "Requests with the same value of this header are charged once."),
        "on_refusal": FieldSpec(ON_REFUSAL, "reject | wait up to 200ms [queue 100] | degrade <handler> | shadow"),
        "on_failure": FieldSpec(ON_FAILURE, "open | closed | local 1/4: the decision when the store fails."),
        "status": FieldSpec(Integer("a status", 400, 599), "The status of a refusal; default 429."),
        "message": FieldSpec(MESSAGE, "The message of a refusal; may hold {retry_after}, {limit}, {remaining}, {rule}."),
        "body": FieldSpec(Body(), "Sent instead of code and message."),
        "problem": PROBLEM,
        "priority": FieldSpec(Integer("a priority", -1_000_000, 1_000_000), "Of several refusals the highest is answered."),
        "alert": FieldSpec(ALERT, "Event and log line when a key has used this part of its limit."),
        "safe_concurrency": SAFE_CONCURRENCY,
    },
    lambda fields, context: RuleDraft(fields),
    example="- {name: api, key: user | ip, limit: token bucket 5/s burst 10}",
)
