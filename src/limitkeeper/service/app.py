"""Application: the operations of the service without a transport. A named request goes in, a decision comes out.

    limit, key, cost      a rule of the policy by its name, under a key that the caller chooses
    request               method, path, headers, client: the policy finds the rules and the keys
    throttle              a rate given by the caller (CL.THROTTLE); it needs no policy

`hit_nowait` and `match_nowait` answer at once, or return None when something has to be awaited (a remote store, a queue). All
other operations are plans (stores/sans_io.py), which `perform` performs at once on a local store, otherwise awaited. Times
are integer microseconds. Every error of a caller is a RequestError whose `kind` each transport translates.

A rule is named as in the policy, and its key is the text that the policy itself would make (`42` for `key: user`), so
requests that are matched and hits that are named share one state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple

from ..algorithms import FixedWindow, TokenBucket
from ..algorithms.claim import Claim, NamedLimit
from ..algorithms.constants import MAX_WAIT
from ..algorithms.limit import refuse_refund
from ..clock import utc_us
from ..decision import Decision
from ..errors import ConfigurationError, InvalidCost, InvalidLimit, LimitkeeperError, StoreUnavailable
from ..limiter_base import checked_cost
from ..policy.calls_by_rule_name import RuleHit, hit_rules, peek_rule, reserve_rule
from ..policy.compiled_rule import CompiledRule
from ..policy.evaluation import Evaluation
from ..policy.gate import Gate
from ..policy.identity.key_and_cache_bounds import hash_long
from ..policy.identity.paths import application_path
from ..policy.key_inspection import all_entries
from ..policy.model import Blocked, Limits, Rule, Tiers
from ..policy.refusal import BLOCKED, blocked_decision
from ..policy.request_context import RequestContext, WrittenRequest, method_of
from ..rate import MAX_COUNT, Rate
from ..stores.contract import Store
from ..stores.guarded import GuardedStore
from ..stores.sans_io import Call, Plan, arun, run
from ..wait_queue import BEGUN, Waiter, refunded, wait_queue_of
from .reservation_tokens import Charged, InvalidToken, ReservationTokens

#: Kinds of RequestError.
INVALID, UNKNOWN_LIMIT, INVALID_TOKEN, FORBIDDEN = "invalid", "unknown_limit", "invalid_token", "forbidden"
#: The most checks of one call, and the most rates of CL.THROTTLE that are remembered.
MAX_CHECKS, MAX_RATES = 1000, 1000
THROTTLE = "cl.throttle"
#: Settled tokens that a process remembers while its store is full; beyond it the oldest are forgotten.
MAX_SETTLED_HERE = 100_000
#: The Decision of a call that nothing limits: translators show its limit and remaining amount as null.
UNLIMITED = Decision(True, -1, -1)


class RequestError(LimitkeeperError):
    """A caller's mistake: `kind` is one of the above; the message says what was expected."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Reserved(NamedTuple):
    """The result of a reservation; `token` is "" when it was refused."""

    evaluation: Evaluation
    token: str


class Application:
    """The operations over one gate. `secret` authenticates reservation tokens, which are valid for `ttl_us`."""

    def __init__(
        self, gate: Gate, *, secret: bytes, ttl_us: int = 3_600_000_000, now_us: Callable[[], int] = utc_us, version: str = ""
    ) -> None:
        self.gate = gate
        self.version = version
        self.draining = False
        self.ttl_us = ttl_us
        self._tokens = ReservationTokens(secret, ttl_us, now_us)
        once = FixedWindow(Rate(1, 2 * ttl_us), align="first")  # a token lives for max_wait + ttl, at most twice the ttl
        self._settled = NamedLimit("reservations", "settled", once)
        self.leaving: set[Any] = set()  # tasks of requests that wait in a queue, and may leave it
        self.rates: dict[tuple[int, int, int], NamedLimit] = {}
        self._settled_here: dict[str, None] = {}  # while the store was full
        self.store.register(self._settled)

    @property
    def store(self) -> Store:
        return self.gate.store

    @property
    def local(self) -> bool:
        """Whether plans can be performed at once, without awaiting a store."""
        return bool(self.gate.store.local)

    def perform(self, plan: Plan[Any], show: Callable[[Any], Any]) -> Any:
        """The shown result of a plan: at once on a local store, otherwise a coroutine of it."""
        return show(run(plan)) if self.gate.store.local else self._perform_later(plan, show)

    async def _perform_later(self, plan: Plan[Any], show: Callable[[Any], Any]) -> Any:
        return show(await arun(plan))

    # Hits ------------------------------------------------------------------------------------------------------

    def rule(self, name: object) -> CompiledRule:
        """The rule of this name in the policy in force."""
        if name is None:
            raise RequestError(INVALID, "limit is missing")
        rule: CompiledRule | None = self.gate.compiled.rules_by_name.get(name) if isinstance(name, str) else None
        if rule is None:
            names = [name for name in self.gate.compiled.rules_by_name if self.allows(name)]
            shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "") or "none"
            raise RequestError(UNKNOWN_LIMIT, f"unknown limit {short(name)}; the policy {self.gate.policy.name!r} has: {shown}")
        return rule

    def allows(self, limit: str) -> bool:
        """Whether this application may use a limit, and name it."""
        return True

    def hit_nowait(self, limit: str, key: str, cost: int = 1, tier: str | None = None) -> Evaluation | None:
        """A hit of a limit under a key; None: perform `hit_many`. The hot path of the transports, which pass checked types."""
        rule = self.gate.compiled.rules_by_name.get(limit)
        if rule is None:
            rule = self.rule(limit)
        return self.gate.hit_rule_nowait(rule, hash_long(key), cost, tier)

    def checked_hit(self, limit: object, key: object, cost: object = 1, tier: object = None) -> RuleHit:
        """The rule, key, cost and tier of a call; RequestError names the field that is wrong."""
        if key is None:
            raise RequestError(INVALID, "key is missing")
        if not isinstance(key, str):
            raise RequestError(INVALID, f"key: expected a string, got {short(key)}")
        rule = self.rule(limit)
        return rule, hash_long(key), self.checked_cost(cost), None if tier is None else checked_tier(rule, tier)

    @staticmethod
    def checked_cost(cost: object, name: str = "cost") -> int:
        try:
            return checked_cost(cost)
        except InvalidCost:
            raise RequestError(INVALID, f"{name}: expected a whole number ≥ 0, got {short(cost)}") from None

    def hit_many(self, hits: Sequence[RuleHit]) -> Plan[list[Evaluation]]:
        """Independent hits, in order, in one call of the store."""
        if len(hits) > MAX_CHECKS:
            raise RequestError(INVALID, f"expected at most {MAX_CHECKS} checks in one call, got {len(hits)}; split them")
        return (yield from hit_rules(self.gate, hits))

    def peek(self, hit: RuleHit) -> Plan[Decision]:
        """The decision that a hit would get now; nothing is stored or counted."""
        decision = yield from peek_rule(self.gate, hit)
        return UNLIMITED if decision is None else available(decision)

    # Requests --------------------------------------------------------------------------------------------------

    def match_nowait(self, context: RequestContext) -> Evaluation | None:
        """A request evaluated by the whole policy; None: await `match`."""
        return self.gate.ask_nowait(context)

    async def match(self, context: RequestContext) -> Evaluation:
        """As `match_nowait`; waits in a rule's queue, or for a remote store."""
        return await self.gate.aask(context)

    # Reservations ----------------------------------------------------------------------------------------------

    def reserve(self, hit: RuleHit, max_wait_us: int = 0) -> Plan[Reserved]:
        """Charges a cost at the earliest start within `max_wait_us`, to be settled when the actual cost is known."""
        if not 0 <= max_wait_us <= min(self.ttl_us, MAX_WAIT):
            raise RequestError(INVALID, f"max_wait: expected 0 to {self.ttl_us / 1e6:g} seconds, got {max_wait_us / 1e6:g}")
        try:
            evaluation = yield from reserve_rule(self.gate, hit, max_wait_us)
        except ConfigurationError as error:
            raise RequestError(INVALID, str(error)) from None
        if not evaluation.allowed:
            return Reserved(evaluation, "")
        claims, decision = evaluation.claims, evaluation.decision
        if evaluation.shadow:  # settled as other charges are
            _, claims, decision = evaluation.shadow[0]
        charged = decision is not None and decision.allowed and not GuardedStore.answered_here(decision)  # by the store
        held = claims if charged and claims is not None else ()
        return Reserved(evaluation, self._tokens.issue(held, decision, hit[0].config.concurrent))

    def settle(self, token: str, used: int) -> Plan[bool]:
        """Sets the actual cost of a reservation: gives the rest back, or charges the difference; its place among requests at a
        time is given back. The first settle or cancel decides; False: it was settled before, or its key was reset. After a
        failure of the store the charge stays."""
        charged = self.charged(token)
        overflow = self.store.overflow
        first = available((yield Call(self.store, "decide_one", (self._settled, charged.id, 1, 0, True))))
        if not (first.allowed if self.store.overflow == overflow else self._is_first_here(charged.id)):
            return False
        pairs = zip(charged.claims, charged.places, strict=True)
        back = [Claim(one.limit, one.key, one.cost - used * (not place), one.cost, one.reset_id) for one, place in pairs]
        back = [one for one in back if one.cost or self.store.local]  # for 0, a local store is asked whether the key was reset
        if not back:
            return True
        made = Decision(True, start_us=charged.start_us, source=charged.source)
        return bool((yield Call(wait_queue_of(self.store), "leave", ([Waiter(back, made, None, BEGUN)],))))

    def _is_first_here(self, token_id: str) -> bool:
        """Whether this process has not settled a token before. It decides while the store is full: an overflow cell that others
        have used says nothing about this token. A token may then be settled once in each worker."""
        is_first = token_id not in self._settled_here
        self._settled_here[token_id] = None
        if len(self._settled_here) > MAX_SETTLED_HERE:
            del self._settled_here[next(iter(self._settled_here))]
        return is_first

    def charged(self, token: str) -> Charged:
        """What a reservation token names; the first of its claims has the name of the limit."""
        try:
            return self._tokens.read(token)
        except InvalidToken as error:
            raise RequestError(INVALID_TOKEN, str(error)) from None

    def cancel(self, token: str) -> Plan[bool]:
        """Gives a whole reservation back; otherwise as `settle`."""
        return (yield from self.settle(token, 0))

    def refund(self, hit: RuleHit) -> Plan[bool]:
        """Gives units back that were not used, at most what was charged. False: nothing limits this key."""
        if hit[0].capacity is not None:
            yield from hit[0].capacity.plan_call("refund", hit[1], min(hit[2], MAX_COUNT))
            return True
        claims = [claim for claim in self._claims(hit) if not isinstance(claim.limit.limit, Blocked)]
        try:
            for claim in claims:
                refuse_refund(claim.limit.limit)
        except ConfigurationError as error:
            raise RequestError(INVALID, str(error)) from None
        if claims:
            yield Call(wait_queue_of(self.store), "leave", ([refunded(claims)],))
        return bool(claims)

    # Operating -------------------------------------------------------------------------------------------------

    def reset(self, limit: object, key: object) -> Plan[None]:
        """Deletes the state of a key, under all tiers and overrides of the limit."""
        rule, text, _, _ = self.checked_hit(limit, key)
        named = {entry.named.identity: entry.named for entry in all_entries(rule, text)}
        if named:
            yield Call(self.store, "reset", ([Claim(one, text) for one in named.values()],))

    def inspect(self, hit: RuleHit) -> Plan[list[tuple[Claim, Decision]]]:
        """The limits of a key, each with its present state; nothing is charged. A blocked key has a limit of 0."""
        evaluation = self.gate.prepare_rule(hit[0], hit[1], 0, hit[3])
        if evaluation.reason == BLOCKED:
            return [(Claim(evaluation.entries[0].named, hit[1], 0), blocked_decision(evaluation))]
        if hit[0].capacity is not None:
            share = yield from hit[0].capacity.plan_call("peek", hit[1], 0)
            return [(Claim(hit[0].capacity_entry.named, hit[1], 0), share)]
        claims = self._claims((hit[0], hit[1], 0, hit[3]))
        if not claims:
            return []
        decision = available((yield Call(self.store, "decide", (claims, 0), {"commit": False})))
        return list(zip(claims, decision.decisions, strict=True))

    def limits(self) -> list[dict[str, Any]]:
        """The rules of the policy in force, with the text of their limits."""
        return [describe(rule) for rule in self.gate.policy.rules]

    def _claims(self, hit: RuleHit) -> list[Claim]:
        """The claims of a hit, also of a rule in shadow mode."""
        evaluation = self.gate.prepare_rule(*hit)
        return evaluation.shadow[0].claims if evaluation.shadow else self.gate._claims(evaluation)

    # CL.THROTTLE -----------------------------------------------------------------------------------------------

    def throttle(self, key: str, max_burst: int, count: int, period: int, quantity: int = 1) -> Plan[Decision]:
        """`count` units per `period` seconds, and `max_burst` more at once, as redis-cell; a quantity of 0 peeks."""
        named = self.rates.get((max_burst, count, period))
        if named is None:
            named = self._add_rate(max_burst, count, period)
        units = self.checked_cost(quantity, "quantity")
        return available((yield Call(self.store, "decide_one", (named, hash_long(key), units, 0, units > 0))))

    def _add_rate(self, max_burst: int, count: int, period: int) -> NamedLimit:
        from ..stores.shared import SharedStore

        for name, value, least in (("max_burst", max_burst, 0), ("count_per_period", count, 1), ("period", period, 1)):
            if value < least:
                raise RequestError(INVALID, f"{name}: expected a whole number ≥ {least}, got {value}")
        full = len(self.rates) >= MAX_RATES
        if full and isinstance(self.store, SharedStore):  # its file keeps every rate for good, with those of the policy
            raise RequestError(INVALID, f"expected at most {MAX_RATES} different rates; write rates per key in a policy")
        try:
            named = NamedLimit(THROTTLE, "throttle", TokenBucket(Rate(count, period * 1_000_000), burst=max_burst + 1))
            self.store.register(named)
        except (InvalidLimit, ConfigurationError) as error:
            raise RequestError(INVALID, f"max_burst {max_burst}, count {count}, period {period}: {error}") from None
        if full:  # the oldest goes; the states of its keys stay in the store, and hold when it comes again
            self.store.unregister(self.rates.pop(next(iter(self.rates))))
        self.rates[max_burst, count, period] = named
        return named


def available(decision: Decision) -> Decision:
    """The decision; raises StoreUnavailable where a guard answered instead of its store, and no rule says what to do then."""
    if GuardedStore.answered_here(decision):
        raise StoreUnavailable("the store could not be asked; try again later")
    return decision


def decision_of(evaluation: Evaluation) -> Decision:
    """The decision to show for an evaluation: that of its limits (its retry with the client's penalty and the rule's spread), of
    a rule in shadow mode (allowed), of a store that failed, or UNLIMITED."""
    decision, refusal = evaluation.decision, evaluation.refusal
    if decision is not None:
        if refusal is None or refusal.retry_us == decision.retry_us:
            return decision
        times = refusal.retry_us, decision.reset_us, decision.wait_us, decision.start_us
        return Decision(False, decision.limit, decision.remaining, *times, decision.name, source=decision.source)
    if refusal is not None:
        return Decision(False, 0, 0, refusal.retry_us, source="closed")
    shadow = evaluation.shadow[0].decision if evaluation.shadow else None
    if shadow is None:
        return UNLIMITED
    return Decision(True, shadow.limit, shadow.remaining, 0, shadow.reset_us, 0, shadow.start_us, shadow.name)


class JoinedLines:
    """A request whose header lines of one name whoever asks has joined with commas, while the application gets them apart and
    may take any. So parts that differ are several values, and a part that is repeated is one, as with lines."""

    __slots__ = ()

    def header(self, name: str) -> str | None:
        value: str | None = super().header(name)  # type: ignore[misc]
        parts = parts_of(value)
        return parts.pop() if len(parts) == 1 else value

    def differs(self, kind: str, name: str) -> bool:
        return len(parts_of(self.header(name))) > 1 if kind == "header" else super().differs(kind, name)  # type: ignore[misc]


def parts_of(value: str | None) -> set[str]:
    """The different parts of a header that has commas; none of one without."""
    return {part.strip() for part in value.split(",")} if value is not None and "," in value else set()


class DescribedRequest(JoinedLines, WrittenRequest):
    """A request that a caller describes, without its body, whatever its headers announce."""

    __slots__ = ()

    def may_have_body(self) -> bool:
        return False


def request_context(fields: object) -> WrittenRequest:
    """The context of a request that a caller describes: method, path (with its query), headers, client (an IP address)."""
    if not isinstance(fields, Mapping):
        raise RequestError(INVALID, f"request: expected an object with method, path, headers and client, got {short(fields)}")
    unknown = sorted(set(fields) - {"method", "path", "headers", "client"})
    if unknown:
        raise RequestError(INVALID, f"request: unknown field {short(unknown[0])}; expected method, path, headers, client")
    client, headers = fields.get("client"), fields.get("headers", {})
    for name in ("method", "path"):
        if name not in fields:
            raise RequestError(INVALID, f"request.{name} is missing")
        if not isinstance(fields[name], str) or not fields[name]:
            raise RequestError(INVALID, f"request.{name}: expected a string that is not empty, got {short(fields[name])}")
    method, path = fields["method"], fields["path"]
    if not path.startswith("/"):
        raise RequestError(INVALID, f"request.path: expected a path that begins with '/', got {short(path)}")
    if client is not None and not is_address(client):
        raise RequestError(INVALID, f"request.client: expected an IP address without a port, got {short(client)}")
    if not isinstance(headers, Mapping) or not all(isinstance(value, str) for value in headers.values()):
        raise RequestError(INVALID, "request.headers: expected an object of strings; join several lines of one header with ', '")
    path, _, query = path.partition("?")
    context = DescribedRequest(method, application_path(path), headers=headers, query=query, peer=client)
    context.method = method_of(method)  # a request, whatever its method: not a message, which fewer rules limit
    return context


def checked_tier(rule: CompiledRule, tier: object) -> str:
    if not isinstance(tier, str):
        raise RequestError(INVALID, f"tier: expected a string, got {short(tier)}")
    if tier in rule.tier_entries:
        return tier
    name, known = rule.name, ", ".join(rule.tier_entries)
    if not known:
        raise RequestError(INVALID, f"limit {name!r} has no tiers; leave tier out")
    raise RequestError(INVALID, f"limit {name!r} has no tier {short(tier)}, only {known}; without a tier its default holds")


def is_address(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(ip_address(value))
    except ValueError:
        return False


def describe(rule: Rule) -> dict[str, Any]:
    """A rule as data: its name, its limits (by tier where it has tiers), and the identities of its key."""
    found: dict[str, Any] = {"name": rule.name, "key": [list(part) for part in rule.key]}
    if isinstance(rule.limit, Tiers):
        found["limits"] = texts(rule.limit.otherwise)
        found["tiers"] = {value: texts(limits) for value, limits in rule.limit.limits}
    else:
        found["limits"] = texts(rule.limit) if rule.capacity is None else [f"capacity {rule.capacity.rate}"]
    return {**found, "action": rule.on_refusal.action, "description": rule.description}


def texts(limits: Limits) -> list[str]:
    return [str(limit) for limit in limits]


def short(value: object) -> str:
    """A value in a message, cut."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
