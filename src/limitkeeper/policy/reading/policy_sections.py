"""Sections of a policy file: the validator of each (`headers`, `exempt`, `penalty_box` …), and the JSON Schema of the whole file.

The fields of the larger sections are in `identities.py` and `rule_fields.py`.
"""

from __future__ import annotations

import os
from itertools import pairwise

from ...algorithms.limit import Limit
from ...concurrency.dependency_rate_caps import DependencyCap
from ..model import Exemption, Headers, Match, PenaltyBoxConfig, RetryAmplification, When
from .diagnostics import SCHEMA, Invalid, ParseContext, bounded_text
from .identities import HEADER_NAME, IDENTIFY, NETWORKS
from .nodes import find_position
from .rule_fields import HOST, KEY, MATCHES, ON_FAILURE, PATHS, PROBLEM, RULE, RULE_NAME, SAFE_CONCURRENCY, WHEN
from .validators import AnyOf, Boolean, Choice, Duration, Field, Fields, Integer, ListOf, ParsedFields, Text, Url, as_pairs, is_a
from .value_parsers import HEADER_NAMES, MAX_FIELD_NAME, parse_cap, parse_field_name, parse_single_limit, parse_store_url

_NO_HEADERS = Headers(wire="none", x=False, reset="off", success="never", partition=False, cors=False)
SELECTORS = ("path", "match", "network", "header", "when")


def _from_environment(fields: ParsedFields, context: ParseContext) -> str | Invalid:
    name = fields["env"]
    value = os.environ.get(name, "").strip()  # a secret that was read from a file ends with a line break
    message, remedy = f"the environment variable {name} is not set", f"set {name}: an empty value would exempt every client"
    return value or context.error(fields.at("env").position, message, remedy, name)


VARIABLE = Text("the name of a variable", bounded_text, "PROBE_TOKEN")
HEADER_VALUE = Fields(
    "environment value", {"env": Field(VARIABLE, "Its variable.", True)}, _from_environment, example="{env: PROBE_TOKEN}"
).or_else("a value", scalar=Text("a value", str, "{env: PROBE_TOKEN}", secret=True, loose=True))
HEADER_VALUES = Fields(
    "header",
    {},
    as_pairs,
    others=HEADER_VALUE,
    key=HEADER_NAME,
    minimum=1,
    example="{X-Probe: {env: PROBE_TOKEN}}",
)


def _exemption(fields: ParsedFields, context: ParseContext) -> tuple[ParsedFields, Exemption]:
    selectors = [name for name in SELECTORS if name in fields]
    if not selectors:
        message = "this exemption does not say which requests are exempt"
        context.error(fields.node.position, message, "add path, match, network, header or when", kind=SCHEMA)
    networks = fields.get("network", ())
    whole = next((network for network in networks if network in ("0.0.0.0/0", "::/0")), None)
    if whole is not None and selectors == ["network"]:
        position = find_position(fields.at("network"), whole)
        context.error(position, f"{whole} exempts every client", "write the networks of the exempt clients", whole)
    if "path" in fields and "match" in fields:
        message = "exemption can't have both 'path' and 'match'"
        context.error(fields.key("match"), message, "write the path into the match: GET /healthz", "match", SCHEMA)
    headers = tuple((name, str(value).strip()) for name, value in fields.get("header", ()))
    for name, value in headers:
        position = fields.at("header").child(name).position
        if not value:
            message = f"an empty {name} would exempt every client that sends one"
            context.error(position, message, "write a secret, like {X-Probe: {env: PROBE_TOKEN}}")
        elif not (value.isascii() and value.isprintable()):
            context.error(position, f"this value of {name} can't be sent in a header", "use printable ASCII")
    matches = fields.get("match", ()) or tuple(Match(path=path) for path in fields.get("path", ()))
    headers = tuple((name.lower(), value) for name, value in headers)
    return fields, Exemption(matches, networks, headers, fields.get("when", When()), fields.get("limits", ()))


RULE_NAMES = ListOf(Text("the name of a rule", str, "user", loose=True), "names of rules")
EXEMPTION = Fields(
    "exemption",
    {
        "path": Field(PATHS, "Paths, for every method."),
        "match": Field(MATCHES, "Which requests, as in a rule."),
        "network": Field(NETWORKS, "Networks of clients."),
        "header": Field(HEADER_VALUES, "Headers with these values, compared in constant time."),
        "when": Field(WHEN, "A condition on the identities."),
        "limits": Field(RULE_NAMES, "Exempt only from these rules; default: all."),
    },
    _exemption,
    rules={"anyOf": [{"required": [name]} for name in SELECTORS], "not": {"required": ["path", "match"]}},
    example="- path: /healthz",
)
FIELD_NAME = Text(
    "the name of a field", parse_field_name, "X-Quota-Remaining", texts={**HEADER_NAMES, "maxLength": MAX_FIELD_NAME}
)


def _field_names(fields: ParsedFields, context: ParseContext) -> tuple[tuple[str, str], ...]:
    names: dict[str, str] = {}
    for word, name in fields.values.items():
        if name.lower() in names:
            message = f"{names[name.lower()]!r} and {word!r} have the same name"
            context.error(fields.at(word).position, message, "give each a name of its own", name)
        names[name.lower()] = word
    return tuple(sorted(fields.values.items()))


FIELD_NAMES = Fields(
    "names",
    {
        "limit": Field(FIELD_NAME, "Instead of X-RateLimit-Limit."),
        "remaining": Field(FIELD_NAME, "Instead of X-RateLimit-Remaining."),
        "reset": Field(FIELD_NAME, "Instead of X-RateLimit-Reset."),
        "retry_after": Field(FIELD_NAME, "Instead of Retry-After, which standard clients read."),
    },
    _field_names,
    example="{limit: X-Quota-Limit, remaining: X-Quota-Remaining}",
)
ON_OR_OFF = Boolean().map(lambda on: Headers() if on else _NO_HEADERS)
HEADERS = Fields(
    "headers",
    {
        "wire": Field(Choice("draft-11", "draft-7", "draft-6", "none"), "The format of RateLimit and RateLimit-Policy."),
        "x": Field(Boolean(), "X-RateLimit-Limit and X-RateLimit-Remaining."),
        "reset": Field(Choice("off", "delta", "epoch"), "X-RateLimit-Reset: seconds from now, or a Unix timestamp."),
        "success": Field(Choice("always", "near", "never"), "On allowed responses: always, when little is left, never."),
        "partition": Field(Boolean(), "pk=, a keyed hash of the key."),
        "cors": Field(Boolean(), "Lists the fields in Access-Control-Expose-Headers."),
        "names": Field(FIELD_NAMES, "Other names of the X- fields and of Retry-After: {remaining: X-Quota-Remaining}."),
    },
    lambda fields, context: Headers(**fields.values),
    example="{wire: draft-11, x: true}",
).or_else("a headers mapping, on or off", scalar=ON_OR_OFF, accepts=is_a(Headers))
REFUSALS = Text("a limit of refusals", parse_single_limit, "100/min", accepts=is_a(Limit))
PENALTIES = ListOf(Duration("1s", "1d"), "a duration, or a list of longer and longer ones", maximum=10)


def _penalty_box(fields: ParsedFields, context: ParseContext) -> PenaltyBoxConfig:
    first, *then = fields["for"]
    for before, after in pairwise(fields["for"]):
        if after <= before:
            message = f"a penalty of {after / 1e6:g} s does not grow: the one before it is {before / 1e6:g} s"
            context.error(fields.at("for").position, message, "write longer and longer ones, like [1min, 1h, 1d]")
    return PenaltyBoxConfig(fields["after"], first, fields.get("key", (("ip",),)), tuple(then))


PENALTY_BOX = Fields(
    "penalty_box",
    {
        "after": Field(REFUSALS, "The limit of refusals per client: 100/min.", True),
        "for": Field(PENALTIES, "How long a client stays in the penalty box; a list: the first time, the second time, …", True),
        "key": Field(KEY, "What identifies a client; default ip."),
    },
    _penalty_box,
    example="{after: 100/min, for: [1min, 1h, 1d], key: user | ip}",
)
_COUNT_ATTEMPTS = Boolean().map(lambda on: RetryAmplification() if on else None)
RETRY_AMPLIFICATION: AnyOf[RetryAmplification | None] = Fields(
    "retry_amplification",
    {
        "key": Field(KEY, "What identifies a client; default ip."),
        "window": Field(Duration("1s", "1h"), "Repetitions within it are attempts of one request; default 60s."),
    },
    lambda fields, context: RetryAmplification(fields.get("key", (("ip",),)), fields.get("window", 60_000_000)),
    example="{key: user | ip, window: 60s}",
).or_else("a mapping, on or off", scalar=_COUNT_ATTEMPTS, accepts=is_a(RetryAmplification))
CAP_RATE = Text("a rate", parse_cap, "300/s", accepts=is_a(Limit))
CAP = Fields(
    "dependency",
    {
        "rate": Field(CAP_RATE, "Calls of all instances together; a bare rate admits it in every window, without bursts.", True),
        "concurrent": Field(Integer("calls", 1, 1_000_000), "Calls of one process at a time; default: any number."),
        "max_waiting": Field(Integer("calls", 0, 1_000_000), "Calls of one process that wait for a place; default: any number."),
        "timeout": Field(Duration("0s", "1h"), "The longest wait of a call; default 1s."),
        "hosts": Field(ListOf(HOST, "a host, or a list of them"), "Host names under which HTTP clients find it."),
    },
    lambda fields, context: DependencyCap(
        **fields.values | {"timeout": fields.get("timeout", 1_000_000) / 1e6, "rate": fields["rate"]}
    ),
    example="{rate: 300/s, concurrent: 40, timeout: 200ms}",
).or_else(
    "a rate, or a dependency mapping",
    scalar=Text("a rate", lambda text: DependencyCap(parse_cap(text)), "300/s", accepts=is_a(DependencyCap)),
)
DEPENDENCIES = Fields(
    "dependencies",
    {},
    lambda fields, context: dict(as_pairs(fields, context)),
    others=CAP,
    key=RULE_NAME,
    example="{inventory: 300/s, payment: {rate: 200/s, concurrent: 40}}",
)
STORE = Url("the URL of a store", parse_store_url, "redis://localhost:6379 or memory://")
EXEMPTIONS = ListOf(EXEMPTION, "a list of exemptions", minimum=0, single=False, lenient=True)
RULES = ListOf(RULE, "a list of rules", minimum=0, maximum=5000, single=False, lenient=True)
POLICY: Fields[ParsedFields] = Fields(
    "policy",
    {
        "name": Field(RULE_NAME, "Namespace of the state in the store; default limitkeeper."),
        "store": Field(STORE, "Where state lives: memory://, shared:///path, redis://host:6379; default memory://."),
        "budget": Field(Duration("100us", "1min"), "The time limit of a remote store; default 100ms."),
        "on_failure": Field(ON_FAILURE, "The default of the rules: open | closed | local 1/4."),
        "instances": Field(Integer("instances", 1, 100_000), "The processes that enforce this policy; default: unknown."),
        "safe_concurrency": SAFE_CONCURRENCY,
        "waiting_threads": Field(Integer("threads", 1, 100_000), "Threads that waiting requests may hold; default 1."),
        "problem": PROBLEM,
        "headers": Field(HEADERS, "Header fields of responses; off for none."),
        "identify": Field(IDENTIFY, "Named properties of a request."),
        "exempt": Field(EXEMPTIONS, "Requests that are not limited."),
        "penalty_box": Field(PENALTY_BOX, "Clients that are refused too often are refused without asking the store."),
        "retry_amplification": Field(RETRY_AMPLIFICATION, "Counts attempts and distinct requests, for a metric and an alert."),
        "dependencies": Field(DEPENDENCIES, "Caps on the calls that this service makes: inventory: 300/s."),
        "limits": Field(RULES, "The rules."),
    },
    renamed={
        "shut_out": "'penalty_box' instead",
        **dict.fromkeys(("override", "overrides"), "it in the rule whose limit it replaces"),
        **dict.fromkeys(("shadow", "dry_run", "on_refusal"), "on_refusal: shadow in each rule that only counts"),
        "rules": "'limits' instead",
    },
    example="limits: [{name: api, limit: 5/s}]",
)


def policy_schema() -> dict[str, object]:
    """The JSON Schema of a policy file, for editors. It checks structure; `limitkeeper policy check` also checks meaning."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "limitkeeper policy",
        "description": "A rate limit policy of limitkeeper.",
        **POLICY.schema,
    }
