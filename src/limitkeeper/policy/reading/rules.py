"""The words of one rule under `limits:`, and the rule that they make."""

from __future__ import annotations

from typing import Any

from ...algorithms.limit import Limit
from ..model import SHARE, SKIP, Answer, Charge, Cost, Key, Limits, Once, OnFailure, OnRefusal, Rule, Tiers, When
from ..overrides import CalledOverrides
from . import limit_parser, store_url, value_parsers
from .conditions import KEY, MATCHES, WHEN
from .fields import Fields, Pairs, Said, Word
from .identities import CALL, TEXT
from .nodes import ListNode, Node, Scalar
from .parse_context import ParseContext, ParseError, bounded
from .validators import (
    BAD,
    Anything,
    Boolean,
    Choice,
    DurationText,
    Json,
    Kinds,
    ListOf,
    Made,
    Number,
    Ready,
    Text,
    Url,
    Validator,
)

# Limits ------------------------------------------------------------------------------------------------------------------


def _is_limit(value: object) -> bool:
    return isinstance(value, Limit)


LIMIT_TEXT = Text("a limit", limit_parser.limits, "token bucket 5/s burst 10", ready=_is_limit, taken=lambda value: (value,))
LIMITS = Kinds(
    "a limit",
    text=LIMIT_TEXT,
    several=Made(ListOf(LIMIT_TEXT, "a list of limits", alone=False), lambda found: tuple(one for some in found for one in some)),
)


class TiersDraft:
    """Limits by an identity, before the identities are known."""

    def __init__(self, said: Said) -> None:
        self.said = said
        self.by: str | None = said.get("by")
        self.limits = tuple((value, said.get(value)) for value in said if value not in ("by", "default"))
        self.otherwise: Limits | None = said.get("default")


TIERS = Fields(
    "limits by an identity",
    {
        "by": Word(Text("an identity", value_parsers.identity_name, "plan"), "The identity whose value chooses.", required=True),
        "default": Word(LIMITS, "For values that are not listed; otherwise those of the identity's own default."),
    },
    lambda said, page: TiersDraft(said),
    others=LIMITS,
    named=bounded,
    example="{by: plan, free: token bucket 20/s burst 40, pro: token bucket 100/s burst 200}",
)
LIMIT = Kinds("a limit", text=LIMIT_TEXT, several=LIMITS.shapes[ListNode], table=TIERS)
LIMIT.example = LIMIT_TEXT.example

# Overrides ---------------------------------------------------------------------------------------------------------------


class KeyPart(Validator):
    """One part of a joined key: a text, or nothing for a part that is absent."""

    what = "a part of a key"

    def read(self, node: Node, page: ParseContext) -> Any:
        if isinstance(node, Scalar) and node.value is None:
            return None
        return TEXT.read(node, page)

    def schema(self) -> Json:
        return {"type": ["string", "number", "boolean", "null"]}


OVERRIDE_ENTRY = Fields(
    "an override",
    {
        "key": Word(
            ListOf(KeyPart(), "a key, or the parts of a joined one"),
            "The value of the key, or a list of its parts.",
            required=True,
        ),
        "limit": Word(LIMITS, "The limit of this one key.", required=True),
    },
    lambda said, page: (said.get("key"), said.get("limit"), said) if "key" in said.values and "limit" in said.values else BAD,
    example="{key: [acme, 42], limit: 100/s}",
)
OVERRIDE = Kinds(
    "limits of single keys",
    table=Pairs("limits of single keys", LIMITS, str, "{acme-corp: token bucket 500/s burst 1000}"),
    several=ListOf(OVERRIDE_ENTRY, "a list of overrides", alone=False, most=10_000),
)


def _overrides(said: Said, page: ParseContext) -> Any:
    if "call" in said:
        call = said.get("call")
        return BAD if call is None else CalledOverrides(call, said.get("keep", 10_000_000))
    return said


OVERRIDES_TABLE = Fields(
    "overrides",
    {
        "call": Word(CALL, "A callable that takes the key and answers a limit, a text or None."),
        "keep": Word(DurationText("0s", "1d"), "How long its answer is kept; default 10s."),
        "redis_hash": Word(Text("the name of a hash", bounded, "shop:limits"), "A Redis hash of key → limit."),
        "url": Word(Url("a URL", store_url.redis_url, "redis://localhost:6379"), "Its server; default: the policy's store."),
        "refresh": Word(DurationText("100ms", "1d"), "How often the hash is read; default 5s."),
    },
    _overrides,
    one_of=("call", "redis_hash"),
)
OVERRIDES = Ready(
    lambda value: callable(getattr(value, "get", None)) and callable(getattr(value, "close", None)), OVERRIDES_TABLE
)

# Cost, charge, once --------------------------------------------------------------------------------------------------------

MOST = 1_000_000_000
UNITS = Number("units", 0, MOST)


def _cost(said: Said, page: ParseContext) -> Any:
    _refuse_beside(said, page, ("estimate",), "response")
    _refuse_beside(said, page, ("default", "max"), "header", "query", "call")
    if "response" in said:
        return Cost("response", said.get("estimate", 1), per=said.get("response", 1))
    if "call" in said:
        return Cost("call", said.get("default", 1), most=said.get("max", MOST), call=said.get("call"))
    source = "header" if "header" in said else "query"
    name = said.get(source, "")
    return Cost(source, said.get("default", 1), name.lower() if source == "header" else name, said.get("max", MOST))


def _refuse_beside(said: Said, page: ParseContext, some: tuple[str, ...], *kinds: str) -> None:
    for word in some:
        if word in said and not any(kind in said for kind in kinds):
            page.wrong(said.word(word), word, f"{word!r} belongs to {' or '.join(kinds)}", "take it out")


COST = Ready(
    callable,
    Kinds(
        "a cost",
        text=Made(Number("a cost", 1, MOST), lambda units: Cost("constant", units)),
        table=Fields(
            "cost",
            {
                "header": Word(
                    Text("the name of a header", value_parsers.header_name, "X-Cost"), "A header that holds a whole number."
                ),
                "query": Word(Text("a name", bounded, "n"), "A query parameter that holds a whole number."),
                "response": Word(Text("a size", value_parsers.size, "1kB", loose=True), "One unit for each of so many bytes."),
                "call": Word(CALL, "A callable that takes the facts of a request and answers a whole number."),
                "default": Word(UNITS, "Where the request says none; default 1."),
                "max": Word(Number("units", 1, MOST), "Never more than this."),
                "estimate": Word(  # of nothing, nobody would ever be refused
                    Number("units", 1, MOST), "Charged before the response is known; default 1."
                ),
            },
            _cost,
            one_of=("header", "query", "response", "call"),
        ),
    ),
)
STATUS = Text("a status", value_parsers.statuses, "401 or 4xx", loose=True)
CHARGE = Ready(
    callable,
    Fields(
        "charge",
        {
            "status": Word(ListOf(STATUS, "statuses"), "Only responses of these count: 401, 4xx, 400-499."),
            "call": Word(CALL, "A callable that takes the status and the facts, and answers whether it counts."),
        },
        lambda said, page: Charge(said.get("status", ()), said.get("call")),
        one_of=("status", "call"),
        example="{status: [401, 403]}",
    ),
)


def _once(text: str) -> Once:
    return Once(value_parsers.header_name(text).lower())


ONCE = Kinds(
    "the name of a header",
    text=Text("the name of a header", _once, "Idempotency-Key"),
    table=Fields(
        "once",
        {
            "header": Word(
                Text("the name of a header", value_parsers.header_name, "Idempotency-Key"),
                "Requests with the same value are charged once.",
            ),
            "for": Word(DurationText("1s", "7d"), "How long a value is remembered; default 24h."),
            "replays": Word(Number("repetitions", 1, 1_000_000), "So many repetitions are free; default 10."),
        },
        lambda said, page: Once(
            str(said.get("header", "idempotency-key")).lower(), said.get("for", 86_400_000_000), said.get("replays", 10)
        ),
    ),
)

# What happens beyond it ------------------------------------------------------------------------------------------------------

ON_REFUSAL = Text(
    "what happens on a refusal",
    value_parsers.on_refusal,
    "reject, wait up to 200ms, degrade <handler> or shadow",
    ready=lambda value: callable(value) or isinstance(value, OnRefusal),
    taken=lambda value: value if isinstance(value, OnRefusal) else OnRefusal("degrade", handler=value),
)
ON_FAILURE = Text(
    "what happens when the store fails",
    value_parsers.on_failure,
    "open, closed or local 1/4",
    ready=lambda value: isinstance(value, OnFailure),
)
MESSAGE = Text("a message", value_parsers.told, '"Too many. Retry after {retry_after}s."')
BODY_WORDS = (*value_parsers.PLACEHOLDERS, "message")


class Body(Anything):
    """A body: any value of JSON, whose texts may hold placeholders."""

    what = "a body"

    def read(self, node: Node, page: ParseContext) -> Any:
        value = super().read(node, page)
        return BAD if value is BAD or not self._texts_hold(node, page) else value

    def _texts_hold(self, node: Node, page: ParseContext) -> bool:
        if isinstance(node, Scalar) and isinstance(node.value, str):
            try:
                value_parsers.told(node.text, BODY_WORDS)
            except ParseError as wrong:
                page.wrong_text(node, wrong)
                return False
        return True


def _alert(value: float) -> float:
    if not 0.01 <= value <= 1:
        raise ParseError(
            f"{value!r} is not between 1% and 100%", f"write {value:g}%" if 1 < value <= 100 else "write it like 80%"
        )
    return float(value)


ALERT = Text(
    "a part of a limit", value_parsers.percent, "80%", ready=lambda value: isinstance(value, float), taken=_alert, loose=True
)
PROBLEM = Boolean()
SAFE_CONCURRENCY = Number("requests at a time", 1, 1_000_000)


class RuleDraft:
    """A rule as it was said, before the identities are known."""

    def __init__(self, said: Said) -> None:
        self.said = said
        self.name: str = said.get("name", "")
        self.key: Key = said.get("key", ())
        self.when: When = said.get("when", When())
        self.limit: Any = said.get("limit", BAD)

    def rule(self, limit: Limits | Tiers, overrides: Any, override: Any, on_failure: OnFailure) -> Rule:
        """The rule; what was not said has its default."""
        said = self.said
        answer = Answer(said.get("status"), said.get("message"), said.get("body"), said.get("problem"))
        cost, charge = said.get("cost", Cost()), said.get("charge", Charge())
        return Rule(
            self.name,
            limit,
            match=said.get("match", ()),
            when=self.when,
            key=self.key,
            override=override,
            overrides=overrides,
            cost=Cost("call", call=cost) if callable(cost) else cost,
            charge=Charge(call=charge) if callable(charge) else charge,
            once=said.get("once"),
            on_refusal=said.get("on_refusal", OnRefusal()),
            on_failure=said.get("on_failure", on_failure),
            answer=answer,
            priority=said.get("priority", 0),
            alert=said.get("alert"),
            unidentified=said.get("unidentified", SKIP),
            description=said.get("description", ""),
        )


RULE = Fields(
    "a rule",
    {
        "name": Word(
            Text("a name", value_parsers.title, "checkout", loose=True),
            "Names the rule: in headers, in numbers, in the store. Once.",
            required=True,
        ),
        "description": Word(Text("a text", str), "For people."),
        "match": Word(MATCHES, "Which requests: POST /checkout, a list, or {methods, path, host}. Without it: all."),
        "when": Word(WHEN, "Only while this holds of the identities."),
        "key": Word(KEY, "Who is counted: user, user | ip, [tenant, user]. Without it: all together."),
        "unidentified": Word(
            Choice(SKIP, SHARE), "Where no part of the key is there: the rule is not meant, or all of them share one key."
        ),
        "limit": Word(
            LIMIT, "How much: token bucket 5/s burst 10; several with ';'; unlimited; or by an identity.", required=True
        ),
        "override": Word(OVERRIDE, "Limits of single keys."),
        "overrides": Word(OVERRIDES, "Where limits of single keys come from while the program runs."),
        "cost": Word(COST, "What a request costs; default 1."),
        "charge": Word(CHARGE, "Which outcomes count; default: all."),
        "once": Word(ONCE, "Requests with the same value of this header are charged once."),
        "on_refusal": Word(ON_REFUSAL, "reject | wait up to 200ms [queue 100] | degrade <handler> | shadow"),
        "on_failure": Word(ON_FAILURE, "open | closed | local 1/4: what holds when the store fails."),
        "status": Word(Number("a status", 400, 599), "The status of a refusal; default 429."),
        "message": Word(MESSAGE, "What a refused client reads; may hold {retry_after}, {limit}, {remaining}, {rule}."),
        "body": Word(Body(), "What is sent instead of the code and the message."),
        "problem": Word(PROBLEM, "Refusals are application/problem+json."),
        "priority": Word(
            Number("a priority", -1_000_000, 1_000_000), "When several refuse, the highest gives status and message."
        ),
        "alert": Word(ALERT, "An event and a log line when the use of a key crosses this part of its limit."),
        "safe_concurrency": Word(SAFE_CONCURRENCY, "Bursts above it are warned of."),
    },
    lambda said, page: RuleDraft(said),
    example="- {name: api, key: user | ip, limit: token bucket 5/s burst 10}",
)
