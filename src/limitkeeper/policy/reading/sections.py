"""Reads the sections at the top of a policy, and describes the whole file as JSON Schema."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...algorithms.limit import Limit
from ..model import Exemption, Headers, Match, PenaltyBoxConfig, When
from .fields import Fields, FieldSpec, ParsedFields, pairs_of
from .identities import IDENTIFY, NETWORKS
from .limit_parser import parse_single_limit
from .match_and_key_fields import KEY, MATCHES, PATHS, WHEN
from .nodes import MappingNode, find_position
from .parse_context import ParseContext, bounded_text
from .phrase_parsers import parse_header_name
from .rules import ON_FAILURE, PROBLEM, RULE, RULE_NAME, SAFE_CONCURRENCY
from .store_url import parse_store_url
from .validators import INVALID, AnyOf, Boolean, Choice, DurationText, Invalid, Json, ListOf, Text, Url

_NO_HEADERS = Headers(wire="none", x=False, reset="off", success="never", partition=False, cors=False)

# Exemptions ----------------------------------------------------------------------------------------------------------------

SELECTORS = ("path", "match", "network", "header", "when")


def _from_environment(fields: ParsedFields, context: ParseContext) -> str | Invalid:
    name = fields.get("env")
    value = os.environ.get(name or "", "").strip()  # a secret that was read from a file ends with a line break
    if value or not name:
        return value or INVALID
    message = f"the environment variable {name} is not set"
    context.error(fields.at("env").position, message, f"set {name}: an empty value would exempt every client", name)
    return INVALID


HEADER_VALUES = pairs_of(
    "header",
    AnyOf(
        "a value",
        scalar=Text("a value", str, "{env: PROBE_TOKEN}", secret=True, loose=True),
        mapping=Fields(
            "environment value",
            {"env": FieldSpec(Text("the name of a variable", bounded_text, "PROBE_TOKEN"), "Its variable.", required=True)},
            _from_environment,
            example="{env: PROBE_TOKEN}",
        ),
    ),
    parse_header_name,
    "{X-Probe: {env: PROBE_TOKEN}}",
)


@dataclass(frozen=True, slots=True, eq=False)
class ExemptionDraft:
    """An exemption with the positions of its fields."""

    fields: ParsedFields
    exemption: Exemption


def _exemption(fields: ParsedFields, context: ParseContext) -> ExemptionDraft:
    selectors = [name for name in SELECTORS if name in fields]
    if not selectors:
        message = "this exemption does not say which requests are exempt"
        context.error(fields.node.position, message, "add path, match, network, header or when")
    networks = fields.get("network", ())
    whole = next((network for network in networks if network in ("0.0.0.0/0", "::/0")), None)
    if whole is not None and selectors == ["network"]:
        position = find_position(fields.at("network"), whole)
        context.error(position, f"{whole} exempts every client", "write the networks of the exempt clients", whole)
    if "path" in fields and "match" in fields:
        message = "exemption can't have both 'path' and 'match'"
        context.error(fields.key("match"), message, "write the path into the match: GET /healthz", "match")
    headers = tuple((name.lower(), str(value).strip()) for name, value in fields.get("header", ()))
    _check_header_values(fields, context)
    matches = fields.get("match", ()) or tuple(Match(path=path) for path in fields.get("path", ()))
    exemption = Exemption(matches, networks, headers, fields.get("when", When()), fields.get("limits", ()))
    return ExemptionDraft(fields, exemption)


def _check_header_values(fields: ParsedFields, context: ParseContext) -> None:
    node = fields.at("header")
    for name, value in fields.get("header", ()):
        position = node.value(name).position if isinstance(node, MappingNode) else node.position
        if not str(value).strip():
            message = f"an empty {name} would exempt every client that sends one"
            context.error(position, message, "write a secret, like {X-Probe: {env: PROBE_TOKEN}}")
        elif not (str(value).strip().isascii() and str(value).strip().isprintable()):
            context.error(position, f"this value of {name} can't be sent in a header", "use printable ASCII")


RULE_NAMES = ListOf(Text("the name of a rule", str, "user", loose=True), "names of rules")
EXEMPTION = Fields(
    "exemption",
    {
        "path": FieldSpec(PATHS, "Paths, for every method."),
        "match": FieldSpec(MATCHES, "Which requests, as in a rule."),
        "network": FieldSpec(NETWORKS, "Networks of clients."),
        "header": FieldSpec(HEADER_VALUES, "Headers with these values, compared in constant time."),
        "when": FieldSpec(WHEN, "A condition on the identities."),
        "limits": FieldSpec(RULE_NAMES, "Exempt only from these rules; default: all."),
    },
    _exemption,
    example="- path: /healthz",
)

# Headers, penalty box ------------------------------------------------------------------------------------------------------

HEADERS = AnyOf(
    "a headers mapping, on or off",
    scalar=Boolean().map(lambda on: Headers() if on else _NO_HEADERS),
    mapping=Fields(
        "headers",
        {
            "wire": FieldSpec(Choice("draft-11", "draft-7", "draft-6", "none"), "The format of RateLimit and RateLimit-Policy."),
            "x": FieldSpec(Boolean(), "X-RateLimit-Limit and X-RateLimit-Remaining."),
            "reset": FieldSpec(Choice("off", "delta", "epoch"), "X-RateLimit-Reset: seconds from now, or a Unix timestamp."),
            "success": FieldSpec(Choice("always", "near", "never"), "On allowed responses: always, when little is left, never."),
            "partition": FieldSpec(Boolean(), "pk=, a keyed hash of the key."),
            "cors": FieldSpec(Boolean(), "Lists the fields in Access-Control-Expose-Headers."),
        },
        lambda fields, context: Headers(**{name: fields.get(name) for name in fields}),
        example="{wire: draft-11, x: true}",
    ),
    accepts=lambda value: isinstance(value, Headers),
)
REFUSALS = Text("a limit of refusals", parse_single_limit, "100/min", accepts=lambda value: isinstance(value, Limit))
PENALTY_BOX = Fields(
    "penalty_box",
    {
        "after": FieldSpec(REFUSALS, "The limit of refusals per client: 100/min.", required=True),
        "for": FieldSpec(DurationText("1s", "1d"), "How long a client stays in the penalty box.", required=True),
        "key": FieldSpec(KEY, "What identifies a client; default ip."),
    },
    lambda fields, context: (
        PenaltyBoxConfig(fields.get("after"), fields.get("for"), fields.get("key", (("ip",),)))
        if "after" in fields.values and "for" in fields.values
        else INVALID
    ),
    example="{after: 100/min, for: 60s, key: user | ip}",
)

# The policy ------------------------------------------------------------------------------------------------------------------

STORE = Url("the URL of a store", parse_store_url, "redis://localhost:6379 or memory://")
EXEMPTIONS = ListOf(EXEMPTION, "a list of exemptions", minimum=0, single=False, lenient=True)
RULES = ListOf(RULE, "a list of rules", minimum=0, maximum=5000, single=False, lenient=True)
POLICY = Fields(
    "policy",
    {
        "name": FieldSpec(RULE_NAME, "Namespace of the state in the store; default limitkeeper."),
        "store": FieldSpec(STORE, "Where state lives: memory://, shared:///path, redis://host:6379; default memory://."),
        "budget": FieldSpec(DurationText("100us", "1min"), "The time limit of a remote store; default 20ms."),
        "on_failure": FieldSpec(ON_FAILURE, "The default of the rules: open | closed | local 1/4."),
        "safe_concurrency": SAFE_CONCURRENCY,
        "problem": PROBLEM,
        "headers": FieldSpec(HEADERS, "Header fields of responses; off for none."),
        "identify": FieldSpec(IDENTIFY, "Named properties of a request."),
        "exempt": FieldSpec(EXEMPTIONS, "Requests that are not limited."),
        "penalty_box": FieldSpec(PENALTY_BOX, "Clients that are refused too often are refused without asking the store."),
        "limits": FieldSpec(RULES, "The rules."),
    },
    lambda fields, context: fields,
    renamed={"shut_out": "penalty_box"},
    example="limits: [{name: api, limit: 5/s}]",
)


def policy_schema() -> Json:
    """The JSON Schema of a policy file, for editors. It checks structure; `limitkeeper policy check` also checks meaning."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "limitkeeper policy",
        "description": "A rate limit policy of limitkeeper.",
        **POLICY.schema(),
    }
