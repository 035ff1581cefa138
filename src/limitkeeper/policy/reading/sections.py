"""The words at the top of a policy, and the policy that all of them make."""

from __future__ import annotations

import os
from typing import Any

from ...algorithms.limit import Limit
from ..model import Exemption, Headers, Match, PenaltyBoxConfig, When
from . import limit_parser, store_url, value_parsers
from .conditions import KEY, MATCHES, PATHS, WHEN
from .fields import Fields, Pairs, Said, Word
from .identities import IDENTIFY, NETWORKS
from .identities import place_of as place_in
from .nodes import Node, Scalar, SourcePosition
from .parse_context import ParseContext, bounded
from .rules import ON_FAILURE, PROBLEM, RULE, SAFE_CONCURRENCY
from .validators import BAD, Boolean, Choice, DurationText, Kinds, ListOf, Text, Url, Validator

_NO_HEADERS = Headers(wire="none", x=False, reset="off", success="never", partition=False, cors=False)

# Exemptions ----------------------------------------------------------------------------------------------------------------


class EnvironmentDraft:
    """A value that stands in the environment."""

    def __init__(self, said: Said) -> None:
        self.name: str = said.get("env", "")
        self.place = said.at("env").place


FROM_ENVIRONMENT = Fields(
    "a value from the environment",
    {"env": Word(Text("the name of a variable", bounded, "PROBE_TOKEN"), "The variable that holds it.", required=True)},
    lambda said, page: EnvironmentDraft(said),
    example="{env: PROBE_TOKEN}",
)
HEADER_VALUES = Pairs(
    "headers and their values",
    Kinds("a value", text=Text("a value", str, "{env: PROBE_TOKEN}", secret=True, loose=True), table=FROM_ENVIRONMENT),
    value_parsers.header_name,
    "{X-Probe: {env: PROBE_TOKEN}}",
)


class ExemptionDraft:
    """An exemption with the places of what it says."""

    def __init__(self, said: Said, exemption: Exemption) -> None:
        self.said = said
        self.exemption = exemption


def _exemption(said: Said, page: ParseContext) -> Any:
    if not any(word in said for word in ("path", "match", "network", "header", "when")):
        told = (
            "this exemption exempts everybody from everything"
            if "limits" not in said
            else "this exemption does not say who is exempt"
        )
        page.wrong(said.node.place, "", told, "say a path, match, network, header or when")
    everybody = [network for network in said.get("network", ()) if network in ("0.0.0.0/0", "::/0")]
    if everybody and not any(word in said for word in ("path", "match", "header", "when")):
        told = f"{everybody[0]} exempts everybody"
        page.wrong(place_in(said.at("network"), everybody[0]), everybody[0], told, "name the networks of those who are exempt")
    if "path" in said and "match" in said:
        page.wrong(
            said.word("match"), "match", "'path' and 'match' stand together", "write the path into the match: GET /healthz"
        )
    matches = said.get("match", ()) or tuple(Match(path=one) for one in said.get("path", ()))
    headers = tuple((name.lower(), _header_value(name, value, said, page)) for name, value in said.get("header", ()))
    return ExemptionDraft(
        said, Exemption(matches, said.get("network", ()), headers, said.get("when", When()), said.get("limits", ()))
    )


REMEDY = "write a secret, like {X-Probe: {env: PROBE_TOKEN}}"


def _header_value(name: str, value: Any, said: Said, page: ParseContext) -> str:
    if not isinstance(value, EnvironmentDraft):
        found, place = str(value).strip(), said.at("header").place
        if not found:
            page.wrong(place, "", f"an empty {name} would exempt everybody who sends one", REMEDY)
        return _sendable(name, found, place, page)
    found = os.environ.get(value.name, "").strip()  # a secret that was read from a file ends with a line break
    if value.name and not found:
        page.wrong(
            value.place,
            value.name,
            f"the environment has no {value.name}",
            f"set {value.name}: an empty value would exempt everybody",
        )
    return _sendable(name, found, value.place, page)


def _sendable(name: str, value: str, place: SourcePosition, page: ParseContext) -> str:
    if not (value.isascii() and value.isprintable()):
        page.wrong(place, "", f"this value of {name} has characters that no header carries", "write it in printable ASCII")
    return value


EXEMPTION = Fields(
    "an exemption",
    {
        "path": Word(PATHS, "Paths, for every method."),
        "match": Word(MATCHES, "Which requests, as in a rule."),
        "network": Word(NETWORKS, "Networks of clients."),
        "header": Word(HEADER_VALUES, "Headers with these values, compared in constant time."),
        "when": Word(WHEN, "While this holds of the identities."),
        "limits": Word(
            ListOf(Text("the name of a rule", str, "user", loose=True), "names of rules"),
            "Only from these rules; default: all.",
        ),
    },
    _exemption,
    example="- path: /healthz",
)

# Headers, shutting out -----------------------------------------------------------------------------------------------------

HEADERS_TABLE = Fields(
    "headers",
    {
        "wire": Word(Choice("draft-11", "draft-7", "draft-6", "none"), "The form of RateLimit and RateLimit-Policy."),
        "x": Word(Boolean(), "X-RateLimit-Limit and X-RateLimit-Remaining."),
        "reset": Word(Choice("off", "delta", "epoch"), "X-RateLimit-Reset: seconds from now, or a moment."),
        "success": Word(Choice("always", "near", "never"), "On answers that were let pass: always, when little is left, never."),
        "partition": Word(Boolean(), "pk=, a keyed hash of the key."),
        "cors": Word(Boolean(), "Names the fields in Access-Control-Expose-Headers."),
    },
    lambda said, page: Headers(**{word: said.get(word) for word in said}),
    example="{wire: draft-11, x: true}",
)


class HeadersShape(Validator):
    """A table of what headers carry, or off."""

    what = "what headers carry"
    example = "headers: off"

    def read(self, node: Node, page: ParseContext) -> Any:
        if isinstance(node, Scalar) and isinstance(node.value, Headers):
            return node.value
        if isinstance(node, Scalar):
            value = Boolean().read(node, page)
            return BAD if value is BAD else Headers() if value else _NO_HEADERS
        return HEADERS_TABLE.read(node, page)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [HEADERS_TABLE.schema(), Boolean().schema()]}


AFTER = Text(
    "how many refusals are too many",
    lambda text: limit_parser.limit(bounded(text)),
    "100/min",
    ready=lambda value: isinstance(value, Limit),
)
PENALTY_BOX = Fields(
    "penalty_box",
    {
        "after": Word(AFTER, "How many refusals: 100/min.", required=True),
        "for": Word(DurationText("1s", "1d"), "How long nobody asks the store for them.", required=True),
        "key": Word(KEY, "Who is shut out; default ip."),
    },
    lambda said, page: (
        PenaltyBoxConfig(said.get("after"), said.get("for"), said.get("key", (("ip",),)))
        if said.get("after") is not None and said.get("for") is not None
        else BAD
    ),
    example="{after: 100/min, for: 60s, key: user | ip}",
)

# The whole -------------------------------------------------------------------------------------------------------------------


class Loaded:
    """What a whole policy said."""

    def __init__(self, said: Said) -> None:
        self.said = said

    def place(self, word: str) -> SourcePosition:
        return self.said.word(word)


STORE = Url("the URL of a store", store_url.store_url, "redis://localhost:6379 or memory://")
POLICY = Fields(
    "a policy",
    {
        "name": Word(
            Text("a name", value_parsers.title, "shop", loose=True), "Names the state in the store; default limitkeeper."
        ),
        "store": Word(
            STORE,
            "Where the state lives: memory://, shared:///path, redis://host:6379; default memory://.",
        ),
        "budget": Word(
            DurationText("100us", "1min"), "A far store answers within this, or the rules' on_failure does; default 20ms."
        ),
        "on_failure": Word(ON_FAILURE, "The default of the rules: open | closed | local 1/4."),
        "safe_concurrency": Word(SAFE_CONCURRENCY, "Bursts above it are warned of."),
        "problem": Word(PROBLEM, "Refusals are application/problem+json."),
        "headers": Word(HeadersShape(), "Which header fields answers carry; off for none."),
        "identify": Word(IDENTIFY, "Facts about a request that have a name."),
        "exempt": Word(
            ListOf(EXEMPTION, "a list of exemptions", least=0, alone=False, sound=True), "Requests that are not limited."
        ),
        "penalty_box": Word(PENALTY_BOX, "Who is refused too often is refused without asking the store."),
        "limits": Word(ListOf(RULE, "a list of rules", least=0, alone=False, sound=True, most=5000), "Who is limited by what."),
    },
    lambda said, page: Loaded(said),
    example="a table with limits: and what belongs to it",
)
