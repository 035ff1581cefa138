"""A rule as a gate runs it: whether a request is meant, its key, its limits, its cost, and what was counted."""

from __future__ import annotations

from typing import Any

try:
    import cython
except ModuleNotFoundError:
    from limitkeeper import _cython_shim as cython  # type: ignore[no-redef]

if cython.compiled:
    from cython.cimports.limitkeeper.policy.evaluation import Entry
    from cython.cimports.limitkeeper.policy.request_context import RequestContext
else:
    from .evaluation import Entry
    from .request_context import RequestContext

from ..algorithms.claim import NamedLimit
from ..observe.snapshot import RESPONSE_BOUNDS_MS, Histogram, RuleSnapshot
from .identity.addresses import read_address
from .identity.callback_errors import CallbackErrors, callback_name
from .identity.client_ip import ClientIp
from .model import SHADOW, SHARE, WAIT, Key, Limits, Rule, Tiers, When

_absent: Any = object()
#: What a rule counts, and how many versions of it are asked for what they counted since they were replaced.
# fmt: off
COUNTERS = ("passed", "refused", "waited", "queue_full", "degraded", "shadow_refused", "near", "alerts", "given_back",
            "replayed", "failed_open", "failed_closed", "failed_local", "sum_ms")
# fmt: on
ELDERS = 8
#: The key of everybody, and of all who could not be told apart under `unidentified: share`.
EVERYONE, UNIDENTIFIED = "*", "-"


@cython.ccall
def identity_of(identities: dict, context: RequestContext, name: str) -> object:  # type: ignore[type-arg]
    """What an identity says of a request; asked once."""
    value = context.identities.get(name, _absent)
    if value is _absent:
        value = identities[name].of(context)
        context.identities[name] = value
    return value


@cython.ccall
def first_present(identities: dict, context: RequestContext, names: tuple, plain: cython.bint) -> object:  # type: ignore[type-arg]
    """The first of these identities that is there. Where there are several, its name stands before its value: somebody who calls
    himself like another one's address is not that other one. `plain`: the value alone, but for such a one."""
    for name in names:
        value = identity_of(identities, context, name)
        if value is not None:
            if len(names) == 1 or (plain and not borrowed(name, identities[name], value)):  # type: ignore[arg-type]
                return value
            return name + ":" + value
    return None


def borrowed(name: str, identity: Any, value: str) -> bool:
    """Whether a value looks like an address, and is none: a user may well be called 203.0.113.9."""
    return name != "ip" and not isinstance(identity, ClientIp) and read_address(value.partition("/")[0]) is not None


def escaped(value: object) -> str:
    """A part of a joined key: no two different lists of parts make the same key."""
    if value is None:
        return "-"
    text = str(value)
    return "%2D" if text == "-" else text.replace("%", "%25").replace("|", "%7C")


def joined(parts: list[Any]) -> str:
    """A joined key; an absent part counts as such."""
    return "|".join([escaped(part) for part in parts])


@cython.ccall
def key_of(identities: dict, context: RequestContext, key: tuple, plain: cython.bint = False) -> object:  # type: ignore[type-arg]
    """The key of a request; None when no part of it is there."""
    if not key:
        return EVERYONE
    if len(key) == 1:
        return first_present(identities, context, key[0], plain)
    parts = [first_present(identities, context, names, plain) for names in key]
    for part in parts:
        if part is not None:
            return joined(parts)
    return None


@cython.ccall
def holds(identities: dict, context: RequestContext, when: tuple) -> cython.bint:  # type: ignore[type-arg]
    """Whether a condition (present, absent, equals) holds."""
    for name in when[0]:
        if identity_of(identities, context, name) is None:
            return False
    for name in when[1]:
        if identity_of(identities, context, name) is not None:
            return False
    for name, values in when[2]:
        if identity_of(identities, context, name) not in values:
            return False
    return True


def condition(when: When) -> Any:
    """A condition prepared for `holds`; None when there is none."""
    if not (when.present or when.absent or when.equals):
        return None
    return (when.present, when.absent, tuple((name, frozenset(values)) for name, values in when.equals))


class WaitingCount:
    """Who waits for a rule now, whichever version of it they came to."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting = 0


@cython.cclass
class CompiledRule:
    """One rule at work. Counters are plain integers; a reload hands them on to the rule of the same name."""

    # fmt: off
    __slots__ = (
        "alert",
        "alerts",
        "by",
        "config",
        "constant",
        "degraded",
        "elders",
        "failed_closed",
        "failed_local",
        "failed_open",
        "given_back",
        "identities",
        "key",
        "limiter",
        "lone",
        "made",
        "name",
        "named",
        "near",
        "needs_settlement",
        "once",
        "otherwise",
        "overridden",
        "overrides",
        "passed",
        "past",
        "queue_full",
        "refused",
        "replayed",
        "shadow",
        "shadow_refused",
        "share",
        "statuses",
        "sum_ms",
        "tiers",
        "times",
        "waited",
        "waiting",
        "waits",
        "when",
    )
    # fmt: on

    def __init__(self, limiter: str, rule: Rule, identities: dict[str, Any]) -> None:
        self.limiter = limiter
        self.config = rule
        self.name = rule.name
        self.identities = identities
        self.when: Any = condition(rule.when)
        self.key: Key = rule.key
        self.lone: Any = rule.key[0][0] if len(rule.key) == 1 and len(rule.key[0]) == 1 else None
        self.named = any(len(names) > 1 for names in rule.key)  # alternatives carry their names, overrides do not
        self.share = rule.unidentified == SHARE
        self.made: dict[Limits, tuple[Entry, ...]] = {}
        self.by: Any = None
        self.tiers: dict[str, Any] = {}
        if isinstance(rule.limit, Tiers):
            self.by = rule.limit.by
            self.tiers = {value: self.entries_of(limits) for value, limits in rule.limit.limits}
            self.otherwise: Any = self.entries_of(rule.limit.otherwise)
        else:
            self.otherwise = self.entries_of(rule.limit)
        self.overridden: Any = {key: self.entries_of(limits) for key, limits in rule.override}
        self.overrides: Any = rule.overrides
        cost = rule.cost
        self.constant = cost.units if cost.source in ("constant", "response") else -1
        self.once = rule.once is not None
        self.needs_settlement = cost.source == "response" or bool(rule.charge.statuses) or rule.charge.call is not None
        self.shadow = rule.on_refusal.action == SHADOW
        self.waits = rule.on_refusal.action == WAIT
        self.alert = -1.0 if rule.alert is None else rule.alert
        self.passed = self.refused = self.waited = self.queue_full = self.degraded = self.shadow_refused = self.near = 0
        self.alerts = self.given_back = self.replayed = self.failed_open = self.failed_closed = self.failed_local = 0
        self.waiting = WaitingCount()
        self.elders: list[CompiledRule] = []
        self.past: dict[str, Any] = {}
        self.times: list[int] = [0] * (len(RESPONSE_BOUNDS_MS) + 1)
        self.statuses: list[int] = [0] * 6
        self.sum_ms = 0.0

    def entries_of(self, limits: Limits) -> tuple[Entry, ...]:
        """The entries of these limits: made once, so that a store finds their place at once."""
        found = self.made.get(limits)
        if found is None:
            if len(self.made) >= 10_000:  # somebody makes up a limit for every key: states live in the store
                self.made.clear()
            labels = [self.name if i == 0 else f"{self.name}.{i + 1}" for i in range(len(limits))]
            found = tuple(
                Entry(self.config, NamedLimit(self.limiter, label, limit), label, self)
                for label, limit in zip(labels, limits, strict=True)
            )
            self.made[limits] = found
        return found

    # What a request is told by ---------------------------------------------------------------------------------

    @cython.ccall
    def key_for(self, context: RequestContext) -> object:
        """The key of this rule; None: not meant."""
        if self.lone is not None:
            value = identity_of(self.identities, context, self.lone)
        else:
            value = key_of(self.identities, context, self.key)
        if value is None and self.share:
            return UNIDENTIFIED
        return value

    @cython.ccall
    def limits_for(self, context: RequestContext, key: str) -> tuple:  # type: ignore[type-arg]
        """The limits that hold for a key: its own, those of its tier, or the rule's."""
        if self.overridden or self.overrides is not None:
            if self.named:  # said of one identity ("user:42"), or of any of them
                found = self.overridden.get(key)
                if found is not None:
                    return found  # type: ignore[no-any-return]
                key = key_of(self.identities, context, self.key, True) or key  # type: ignore[assignment]
            found = self.overridden.get(key)
            if found is not None:
                return found  # type: ignore[no-any-return]
            limits = None if self.overrides is None else self.overrides.get(key)
            if limits is not None:
                return self.entries_of(tuple(limits))
        if self.by is None:
            return self.otherwise  # type: ignore[no-any-return]
        tier: Any = identity_of(self.identities, context, self.by)
        return self.tiers.get(tier, self.otherwise)  # type: ignore[no-any-return]

    @cython.ccall
    def cost_for(self, context: RequestContext) -> cython.longlong:
        """What this request costs."""
        if self.constant >= 0:
            return self.constant
        return told_cost(self.config, context)

    @cython.ccall
    def meant(self, context: RequestContext) -> cython.bint:
        """Whether the rule's condition holds."""
        if self.when is None:
            return True
        return holds(self.identities, context, self.when)

    # Numbers ---------------------------------------------------------------------------------------------------

    def inherit(self, before: CompiledRule) -> None:
        """Takes over what the rule of the same name counted in the versions before, and those who wait for it still. Requests
        that began with a version before are counted there: the last few are asked again whenever somebody wants the sum."""
        self.waiting, self.times, self.statuses = before.waiting, before.times, before.statuses
        elders = [*before.elders, before]
        self.past = dict(before.past)
        for elder in elders[:-ELDERS]:
            for name in COUNTERS:
                self.past[name] = self.past.get(name, 0) + getattr(elder, name)
        self.elders = elders[-ELDERS:]
        before.elders = []

    def counted(self) -> dict[str, Any]:
        """Everything that was counted, in all versions of the rule."""
        rules = [*self.elders, self]
        return {name: self.past.get(name, 0) + sum(getattr(compiled_rule, name) for compiled_rule in rules) for name in COUNTERS}

    def snapshot(self) -> RuleSnapshot:
        counted = self.counted()
        times = Histogram(RESPONSE_BOUNDS_MS, tuple(self.times), counted.pop("sum_ms"))
        statuses = {f"{i}xx": n for i, n in enumerate(self.statuses) if n}
        return RuleSnapshot(self.name, waiting=self.waiting.waiting, responses=times, statuses=statuses, **counted)


#: What functions of the application that tell costs are complained of for.
callback_errors = CallbackErrors()


def called_cost(rule: Rule, context: Any) -> int:
    """What a function of the application says; when it raises, or says no whole number, the default."""
    cost = rule.cost
    assert cost.call is not None
    try:
        told = cost.call(context)
    except Exception as error:
        callback_errors.report("%s raised %s: the request costs %d", callback_name(cost.call), type(error).__name__, cost.units)
        return cost.units
    if isinstance(told, bool) or not isinstance(told, int):
        callback_errors.report(
            "%s answered a %s, not a whole number: it costs %d", callback_name(cost.call), type(told).__name__, cost.units
        )
        return cost.units
    return max(0, min(int(told), cost.most))


def told_cost(rule: Rule, context: Any) -> int:
    """A cost that the request itself tells, at most the rule's most; what is no whole number costs the default. No client says
    that its own request costs nothing: only where the default is 0, and in a function of the application, 0 is a cost."""
    cost = rule.cost
    if cost.source == "call":
        return called_cost(rule, context)
    if context.differs(cost.source, cost.name):  # several, of which the application may take any
        return cost.most
    text = context.header(cost.name) if cost.source == "header" else context.query(cost.name)
    if text is None or not text.isascii() or not text.isdigit():
        return cost.units
    told = int(text) if len(text) <= 18 else cost.most
    return max(min(1, cost.units), min(told, cost.most))
