"""Checks of a policy that is valid by its schema: undefined names, costs that no limit can hold, combinations that can't work,
and rules, conditions, tiers and overrides that no request can reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import islice

from ...algorithms import LeakyBucketQueue, SlidingWindowCounter
from ...algorithms.limit import Limit
from ...errors import ConfigurationError
from ...rate import Rate
from ...stores.guarded.share import parse_share
from ..burst_conflicts import BUCKETS, burst_of, covers, cuts, meet_somewhere, on_all_routes, overlap
from ..identity.addresses import read_address
from ..identity.body import BodyField
from ..identity.client_ip import ClientIp
from ..identity.identify import Captured, Network, RequestPart
from ..identity.paths import normalize_path, segments_of
from ..model import (
    BLOCKED,
    LOCAL,
    SHADOW,
    SHARE,
    WAIT,
    Capacity,
    Exemption,
    Identity,
    Key,
    Limits,
    Match,
    Once,
    Rule,
    Tiers,
    When,
)
from .assembly import Assembly
from .diagnostics import NOTE, WARNING, did_you_mean
from .import_string import ImportString, callables_of, import_and_check
from .nodes import Node, SourcePosition, find_position
from .validators import ParsedFields

#: Fields of `when:` beside identities.
WHEN = ("present", "absent")
#: More pairs of templates are not compared.
MAX_PAIRS = 500_000
#: Sections whose key identifies a client, and what one key for all clients would do.
SHARED_KEYS = {
    "penalty_box": "one client could put all others into the penalty box",
    "retry_amplification": "requests of different clients would be taken for retries",
}
#: A template that captures a name: depth of the capture, segments, fields of the rule or exemption.
Capture = tuple[int, list[str], ParsedFields]


class SemanticChecks:
    """Adds the diagnostics of all checks of one policy to its context."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly, self.context, self.identities = assembly, assembly.context, assembly.identities
        self.rules, self.exemptions = assembly.rules, assembly.exemptions
        self.few_capacities = self.are_few(rule for _, rule in self.rules if rule.capacity is not None)

    def run(self) -> None:
        self.check_rule_names()
        self.check_identities()
        self.check_exempt_rules()
        for fields, rule in self.rules:
            self.check_when(rule.when, fields.at("when"))
            self.check_key(fields, rule)
            self.check_tiers(fields, rule)
            self.check_override(fields, rule)
            if rule.capacity is not None:
                self.check_capacity(fields, rule, rule.capacity)
        for fields, exemption in self.exemptions:
            self.check_when(exemption.when, fields.at("when"))
        self.check_exempted()
        for fields, rule in self.rules:
            self.check_limits_and_cost(fields, rule)
        self.check_store()
        self.check_budget()
        self.check_cut_bursts()
        self.check_captured_identities()
        self.check_captures()
        self.check_routes()
        if not self.context.failed and not self.rules:
            position = self.assembly.fields.key("limits")
            self.context.warning(position, "this policy limits nothing: it has no rule", "add limits: with at least one rule")
        self.check_callbacks()

    def check_rule_names(self) -> None:
        """Names of rules are unique, and differ from the names under which other rules keep state in the store."""
        labels: dict[str, str] = {}
        for fields, rule in self.rules:
            for number in range(2, max(len(limits) for limits, _ in limits_of(fields, rule)) + 1):
                labels[f"{rule.name}.{number}"] = f"limit {number} of rule {rule.name!r}"
            if rule.once is not None:
                labels[f"{rule.name} once"] = f"the idempotency keys of rule {rule.name!r}"
                labels[f"{rule.name} replays"] = f"the repetitions of rule {rule.name!r}"
            if rule.concurrent is not None:
                labels[f"{rule.name} concurrent"] = f"the running requests of rule {rule.name!r}"
        seen: dict[str, ParsedFields] = {}
        for fields in self.assembly.rule_fields:
            name, position = fields.get("name", ""), fields.at("name").position
            first = seen.setdefault(name, fields) if name else fields
            if first is not fields:
                line = first.at("name").position.line
                where = f"in line {line}" if line else f"at {first.node.position.path}"
                message = f"duplicate rule name {name!r}; the first one is {where}"
                self.context.error(position, message, "rename one of them", name)
            if name in labels:
                self.context.error(position, f"{name!r} is the name of {labels[name]} in the store", "rename this rule", name)

    def check_identities(self) -> None:
        """All identities that rules, exemptions and other sections name are defined."""
        for fields in self.assembly.rule_fields:
            self.check_defined(key_names(fields.get("key", ())), fields.at("key"))
            self.check_defined(when_names(fields.get("when", When())), fields.at("when"), WHEN)
            once = fields.get("once")
            self.check_defined(once.bind if isinstance(once, Once) else (), fields.at("once").child("bind"))
            tiers = fields.get("limit")
            if isinstance(tiers, ParsedFields) and tiers.get("by") is not None:
                self.check_defined((tiers.get("by"),), tiers.at("by"))
        for fields, exemption in self.exemptions:
            self.check_defined(when_names(exemption.when), fields.at("when"), WHEN)
        for section, shared in SHARED_KEYS.items():
            config = self.assembly.fields.get(section)
            if config is not None:
                node = self.assembly.fields.at(section).child("key")
                self.check_defined(key_names(config.key), node)
                bodies = [name for name in key_names(config.key) if isinstance(self.identities.by_name.get(name), BodyField)]
                if bodies:
                    message = f"{bodies[0]!r} is read from the body, which not every request is read for"
                    self.context.error(find_position(node, bodies[0]), message, "write another identity", bodies[0])
                if not config.key:
                    self.context.error(node.position, f"with one key for all clients, {shared}", "write key: ip, or user | ip")

    def check_defined(self, names: tuple[str, ...], node: Node, fields: tuple[str, ...] = ()) -> None:
        known, seen = self.identities.names, set[str]()
        for name in names:
            if name not in known:
                remedy = did_you_mean(
                    name, [*fields, *sorted(known)], f"define it: identify: {{{name}: {{header: X-{name.title()}}}}}"
                )
                self.context.error(find_position(node, name), f"unknown identity {name!r}", remedy, name)
            elif name in seen and "when" not in node.position.path:
                self.context.error(find_position(node, name), f"{name!r} is listed twice in this key", "remove one of them", name)
            seen.add(name)

    def check_exempt_rules(self) -> None:
        names = [fields.get("name") for fields in self.assembly.rule_fields if fields.get("name")]
        for fields, exemption in self.exemptions:
            for name in exemption.rules:
                if name not in names:
                    position = find_position(fields.at("limits"), name)
                    self.context.error(position, f"unknown rule {name!r}", did_you_mean(name, names), name)

    def check_callbacks(self) -> None:
        """All callables of the policy can be called; those that it names are imported only where the caller wants it."""
        for call, parameters in callables_of(self.assembly.policy):
            named = call.name if isinstance(call, ImportString) else ""
            if named and not self.context.imports:
                continue
            try:
                import_and_check(call, parameters)
            except ConfigurationError as error:
                message, _, remedy = str(error).partition("; ")
                node = self.assembly.fields.node
                self.context.error(find_position(node, named) if named else node.position, message, remedy, named)

    def check_limits_and_cost(self, fields: ParsedFields, rule: Rule) -> None:
        """No cost exceeds a capacity, no charge needs an impossible refund, and what works only partly gives a warning."""
        context, cost, node = self.context, rule.cost, fields.at("cost")
        limits = [(limit, position) for some, position in limits_of(fields, rule) for limit in some if some != BLOCKED]
        blocked = [position for some, position in limits_of(fields, rule) if some == BLOCKED]
        if blocked and rule.on_refusal.action == SHADOW:
            context.error(blocked[0], "a blocked key is refused at once, and shadow refuses nothing", "write a limit, or reject")
        for limit, position in limits:
            self.check_burst(limit, position, rule.total_concurrency)
        unbounded = [] if rule.total_concurrency is None else [one for one in fields.get("override", ()) if not one.limits]
        for entry in unbounded:
            message = f"an unlimited key may exceed safe_concurrency, {rule.total_concurrency} for all instances together"
            context.warning(entry.limit_node.position, message, "give it a limit, or add a rule without key", "unlimited", NOTE)
        if rule.on_failure.action == LOCAL:
            self.check_local_share(fields if "on_failure" in fields else self.assembly.fields, parse_share(rule.on_failure.share))
        if not (limits or blocked) and rule.overrides is None and rule.concurrent is None and rule.capacity is None:
            position = fields.at("limit").position
            context.warning(position, f"rule {rule.name!r} limits nothing", "remove it, or give it a limit", "unlimited")
        for limit, _ in limits:
            if cost.source in ("constant", "response") and cost.units > limit.capacity:
                message = f"a cost of {cost.units} never fits {limit}, whose capacity is {limit.capacity}"
                context.error(node.child("estimate").position, message, "raise the limit, or lower the cost", str(cost.units))
                break
            if node.child("max") is not node and cost.most > limit.capacity:
                message = f"a cost of {cost.most} would never fit {limit}, whose capacity is {limit.capacity}"
                context.warning(node.child("max").position, message, f"write max: {limit.capacity}", str(cost.most))
                break
        else:
            refunds = rule.charge.statuses or rule.charge.call is not None or cost.source == "response"
            if refunds and any(isinstance(limit, LeakyBucketQueue) for limit, _ in limits):
                name = "charge" if "charge" in fields else "cost"
                message = "a leaky bucket queue can't refund what a response is not charged for: its turn is over"
                context.error(fields.key(name), message, "use a token bucket", name)
        if rule.on_refusal.action == WAIT and any(isinstance(limit, SlidingWindowCounter) for limit, _ in limits):
            message = "a sliding window counter can't reserve: a waiting request asks again, and may be overtaken"
            remedy = "use a token bucket or a leaky bucket queue to wait in order"
            context.warning(fields.at("on_refusal").position, message, remedy)
        queues = [one for one in limits if isinstance(one[0], LeakyBucketQueue) and one[0].bounded]
        if queues and rule.on_refusal.action != WAIT:
            message = "the capacity of a leaky bucket queue counts waiting requests, and no request of this rule waits"
            context.warning(queues[0][1], message, "add on_refusal: wait up to 200ms, or use a token bucket", str(queues[0][0]))
        if rule.once is not None and cost.source == "response":
            message = "the response to a repetition is not charged for its size"
            context.warning(fields.key("once"), message, "charge the size in a rule of its own, without once", "once")
        if rule.on_refusal.action == SHADOW and rule.once is not None:
            message = "a shadow rule counts repetitions too, so it reports more refusals than it would give when enforced"
            context.warning(fields.key("once"), message, "remove once while the rule is in shadow", "once")

    def check_burst(self, limit: Limit, position: SourcePosition, total: int | None) -> None:
        """A burst is at most what all instances can handle at once; a note says when it needs every one of them."""
        if total is None or not isinstance(limit, BUCKETS):
            return
        instances, burst = self.assembly.policy.instances or 1, limit.capacity
        safe = total // instances
        product = f"{instances} instances × {safe} = {total}" if instances > 1 else f"{safe}"
        if burst > total:
            message = f"a burst of {burst} exceeds safe_concurrency {product}"
            self.context.warning(position, message, f"write burst {total}, or raise safe_concurrency", str(limit))
        elif burst > total - safe and instances > 1:
            message = f"a burst of {burst} needs all {instances} instances: {product}, and {total - safe} while one is down"
            self.context.warning(position, message, f"write burst {total - safe} to have one instance to spare", str(limit), NOTE)

    def check_store(self) -> None:
        """Several instances count together. A store that is not written here may be passed in Python: that gives a note."""
        fields, instances = self.assembly.fields, self.assembly.policy.instances or 1
        if instances > 1 and self.rules and self.assembly.policy.store.startswith("memory:"):
            text = "the store memory:// is one for each instance" if "store" in fields else "the default store is memory://"
            message = f"{text}: {instances} instances count alone, and admit {instances} times each limit together"
            remedy = "write store: redis://…, or shared:///path for the processes of one host"
            position = fields.at("store").position if "store" in fields else fields.key("instances")
            self.context.warning(position, message, remedy, "", WARNING if "store" in fields else NOTE)

    def check_budget(self) -> None:
        """A number without a unit is in seconds, and milliseconds may be meant."""
        fields, budget_us = self.assembly.fields, self.assembly.policy.budget_us
        node = fields.at("budget")
        if "budget" in fields and isinstance(node.value, int | float) and budget_us > 1_000_000:
            message = f"a request may wait {budget_us / 1e6:g} s for a store that does not answer"
            self.context.warning(node.position, message, f"write {node.text}ms, or {node.text}s if that is meant", node.text)

    def check_local_share(self, fields: ParsedFields, share: Fraction) -> None:
        """While the store fails, the shares of all instances together are at most the limit."""
        instances = self.assembly.policy.instances or 1
        if share * instances > 1:
            message = f"{instances} instances with a share of {share} admit {float(share * instances):g} times the limit together"
            self.context.warning(fields.at("on_failure").position, message, f"write local, which is 1/{instances} here")

    def are_few(self, others: Iterable[Rule | Exemption]) -> bool:
        """Whether these are compared with all rules."""
        templates, own = (sum(max(1, len(one.match)) for one in some) for some in (others, (rule for _, rule in self.rules)))
        return templates * own <= MAX_PAIRS

    def check_cut_bursts(self) -> None:
        """Notes bursts that no key can use, because a rule for the same requests allows less at once."""
        bursts = [(rule, largest_burst(fields, rule)) for fields, rule in self.rules if rule.on_refusal.action != SHADOW]
        bounded = [(rule, burst) for rule, burst in bursts if burst is not None]
        if not self.are_few(rule for rule, _ in bounded):
            return
        for fields, rule in self.rules:
            others = [(burst, other.name) for other, burst in bounded if other is not rule and cuts(other, rule)]
            least, by = min(others, default=(1 << 63, ""))
            for limit, position in ((limit, position) for some, position in limits_of(fields, rule) for limit in some):
                if isinstance(limit, BUCKETS) and limit.capacity // max(1, rule.cost.units) > least:
                    message = f"the burst of {limit.capacity} is cut to {least} by rule {by!r}"
                    self.context.warning(position, message, f"raise the burst of {by!r}, or lower this one", str(limit), NOTE)

    def check_when(self, when: When, node: Node) -> None:
        """The condition of a rule or an exemption can hold."""
        required = {*when.present, *(name for name, _ in when.equals)}
        for name in when.absent:
            default, position = self.identities.default(name), find_position(node.child("absent"), name)
            if name in required:
                self.context.error(position, f"{name!r} can't be both present and absent", "remove one of them", name)
            elif default is not None:
                message = f"{name!r} has the default {default!r}, so it is never absent"
                self.context.error(position, message, f"write {name}: [{default}], or remove the default", name)
        for name, values in when.equals:
            known = self.known_values(name)
            for value in values:
                normalized = normalize_value(self.identities.by_name.get(name), value)
                if known is not None and value not in known:
                    remedy = did_you_mean(value, known)
                elif normalized != value:
                    remedy = f"write {normalized!r}"
                else:
                    continue
                self.context.error(find_position(node.child(name), value), f"{name!r} is never {value!r}", remedy, value)

    def known_values(self, name: str) -> tuple[str, ...] | None:
        """All values that an identity can have; None where they are not known."""
        identity = self.identities.by_name.get(name)
        if not isinstance(identity, Network):
            return None
        default = () if identity.default is None else (identity.default,)
        return tuple(dict.fromkeys((*(value for value, _ in identity.classes), *default)))

    def check_key(self, fields: ParsedFields, rule: Rule) -> None:
        """At least one part of the key can be present, and one key for all requests is meant."""
        names, position = key_names(rule.key), fields.at("key").position
        if "key" not in fields:
            message = f"rule {rule.name!r} has no key: all requests share its limit"
            self.context.warning(fields.key("name"), message, "write key: ip, or key: everyone if that is meant", rule.name, NOTE)
        if not names or rule.unidentified == SHARE:
            return
        if all(name in rule.when.absent for name in names):
            message = "the rule applies only when its key is absent, so it never applies"
            self.context.error(position, message, "write another key, or unidentified: share")
        parts = [self.identities.by_name.get(name) for name in names]
        captured = {segment for match in rule.match for segment in segments_of(match.path)}
        absent = [one.name for one in parts if isinstance(one, Captured) and one.default is None]
        missing = [name for name in absent if f"{{{name}}}" not in captured]
        if len(missing) == len(names):
            message = f"no path of this rule captures {{{missing[0]}}}, so its key is never present"
            self.context.error(position, message, f"write it into match:, like /orders/{{{missing[0]}}}")

    def check_tiers(self, fields: ParsedFields, rule: Rule) -> None:
        """Every value that has a limit is one that the identity can have."""
        by, limits = (rule.limit.by, rule.limit.limits) if isinstance(rule.limit, Tiers) else ("", ())
        known = self.known_values(by)
        for value, _ in limits:
            if known is not None and value not in known:
                message = f"{by!r} is never {value!r}, so this limit is never used"
                self.context.error(find_position(fields.at("limit"), value), message, did_you_mean(value, known), value)

    def check_override(self, fields: ParsedFields, rule: Rule) -> None:
        """Every overridden key is one that a request can have, and not one of several identities."""
        identities = self.identities.by_name
        parts = [(entry, *part) for entry in fields.get("override", ()) for part in zip(rule.key, entry.parts, strict=False)]
        for entry, names, value in parts:
            if not value:
                continue
            position = find_position(entry.key_node, value)
            normalized = {normalize_value(identities.get(name), value) for name in names}
            if value not in normalized and len(normalized) == 1:
                message = f"no request has the key {value!r}, so this limit is never used"
                self.context.error(position, message, f"write {normalized.pop()!r}", value)
            named = [name for name in names if name != "ip" and not isinstance(identities.get(name), ClientIp)]
            is_address = read_address(value.partition("/")[0]) is not None
            if len(named) > 1 and value.partition(":")[0] not in names and not is_address:
                message = f"{value!r} may be the value of {' or of '.join(named)}, and each would have this limit"
                self.context.warning(position, message, f"write '{named[0]}:{value}' for one of them", value)

    def check_capacity(self, fields: ParsedFields, rule: Rule, capacity: Capacity) -> None:
        """The guarantees fit the capacity, belong to keys that a request can have, and leave something for the others."""
        context, node = self.context, fields.at("guarantee")
        if len(rule.key) != 1:
            message = "a capacity is divided among keys" + (" of one part" if rule.key else ", and this rule has one key for all")
            context.error(fields.key("capacity"), message, "write key: tenant, or tenant | ip", "capacity")
            return
        names = rule.key[0]
        for field, key in [(name, key) for name in ("guarantee", "share") for key, _ in fields.get(name, ())]:
            if len(names) > 1 and key.partition(":")[0] not in names:
                message = f"{key!r} does not say of which identity: this rule has {' | '.join(names)}"
                context.error(find_position(fields.at(field), key), message, f"write {names[0]}:{key}", key)
        total, promised = per_second(capacity.rate), sum(per_second(rate) for _, rate in capacity.guarantees)
        sums = f"the guarantees add up to {float(promised):g}/s"
        if promised > total:
            message = f"{sums}, more than the capacity of {capacity.rate}"
            context.error(node.position, message, f"lower them by {float(promised - total):g}/s, or raise the capacity")
        elif promised == total:
            message = f"{sums}, which is all of the capacity: every other key may be starved"
            context.warning(node.position, message, "raise the capacity, or lower a guarantee")
        self.check_starvation(fields, rule, capacity, total - promised)
        burst = (total + promised) * capacity.window_us / 1_000_000
        if rule.total_concurrency is not None and burst > rule.total_concurrency:
            message = f"a window of {capacity.window_us / 1e6:g} s admits up to {float(burst):g} requests at once, more than "
            remedy = (
                f"write capacity: {{rate: {capacity.rate}, window: {int(rule.total_concurrency * 1000 / (total + promised))}ms}}"
            )
            context.warning(fields.at("capacity").position, f"{message}safe_concurrency {rule.total_concurrency}", remedy)

    def check_starvation(self, fields: ParsedFields, rule: Rule, capacity: Capacity, rest: Fraction) -> None:
        """Keys whose own limit is above what the guarantees of others leave, and guarantees above the key's own limit."""
        if not self.few_capacities:
            return
        names, promised, left = rule.key[0], dict(capacity.guarantees), f"the guarantees of others leave {float(rest):g}/s"
        single = [
            other for _, other in self.rules if len(other.key) == 1 and len(other.key[0]) == 1 and meet_somewhere(rule, other)
        ]
        for other in single:
            identity = other.key[0][0]
            for key, limits in other.override if identity in names else ():
                text = key if len(names) == 1 else f"{identity}:{key}"
                rates = [per_second(limit.rate) for limit in limits]
                if rates and text not in promised and text not in dict(capacity.shares) and min(rates) > rest:
                    message = f"{text!r} may be starved: rule {other.name!r} admits {float(min(rates)):g}/s, {left}"
                    remedy = "give it a guarantee or a share, if its limit is a promise"
                    self.context.warning(fields.at("capacity").position, message, remedy)
            always = on_all_routes(other, rule) and other.when in (When(), rule.when) and other.on_refusal.action != SHADOW
            for key, rate in promised.items() if always else ():
                own = dict(other.override).get(
                    key.removeprefix(f"{identity}:"), () if isinstance(other.limit, Tiers) else other.limit
                )
                slowest = min((per_second(limit.rate) for limit in own), default=None)
                mine = identity in names and (len(names) == 1 or key.startswith(f"{identity}:"))
                if mine and slowest is not None and slowest < per_second(rate):
                    message = f"the guarantee of {rate} is never used up: rule {other.name!r} admits {float(slowest):g}/s"
                    position = find_position(fields.at("guarantee"), key)
                    self.context.warning(position, message, f"lower it, or raise the limit of {other.name!r}", key)

    def check_exempted(self) -> None:
        """No rule has all of its requests exempt."""
        unconditional = [
            (fields.node.position, one)
            for fields, one in self.exemptions
            if one.match and not one.networks and not one.headers and one.when == When()
        ]
        if not self.are_few(one for _, one in unconditional):
            return
        for fields, rule in self.rules:
            position = next((position for position, one in unconditional if exempts(one, rule)), None)
            if position is not None:
                where = f"the exemption in line {position.line}" if position.line else position.path
                message = f"rule {rule.name!r} is unreachable: {where} exempts all of its requests"
                self.context.error(fields.key("name"), message, "narrow the exemption, or remove the rule", rule.name)

    def check_captured_identities(self) -> None:
        """Every identity from the path is captured by some template."""
        templates = [match.path for _, rule in self.rules for match in rule.match]
        for name, identity in self.identities.by_name.items():
            if isinstance(identity, Captured) and not any(f"{{{identity.name}}}" in path for path in templates):
                message = f"the path of no rule captures {{{identity.name}}}, so {name!r} is never present"
                remedy = f"write it into a match:, like /orders/{{{identity.name}}}"
                self.context.warning(self.identities.fields.key(name), message, remedy, name)

    def check_routes(self) -> None:
        """A rule that counts by route alone limits nothing where no framework has routed the request."""
        routes = {name for name, one in self.identities.by_name.items() if one == RequestPart("route")}
        for fields, rule in self.rules:
            names = key_names(rule.key)
            if names and routes.issuperset(names) and rule.unidentified != SHARE:
                message = "the route is known only in limits on handlers: a middleware does not limit by it"
                self.context.warning(
                    fields.at("key").position, message, "write [ip, route], or a rule for each path", names[0], NOTE
                )

    def check_captures(self) -> None:
        """Templates that match one path capture a name at the same segment; otherwise a client could vary one for a new key."""
        names = {f"{{{one.name}}}" for one in self.identities.by_name.values() if isinstance(one, Captured)}
        found: dict[str, list[Capture]] = {}
        matching: list[tuple[ParsedFields, Rule | Exemption]] = [*self.rules, *self.exemptions]
        for fields, one in matching:
            for segments in (segments_of(match.path) for match in one.match):
                for depth, segment in enumerate(segments):
                    if segment in names:
                        found.setdefault(segment, []).append((depth, segments, fields))
        for name, uses in found.items():
            if len({depth for depth, _, _ in uses}) == 1:
                continue
            pairs = ((first, second) for number, second in enumerate(uses) for first in uses[:number] if first[0] != second[0])
            for (_, earlier, _), (_, segments, fields) in islice(pairs, MAX_PAIRS):
                if overlap(earlier, segments):
                    message = f"{name} is captured at another segment in /{'/'.join(earlier)}, and a path may match both"
                    self.context.error(fields.at("match").position, message, "rename one of them")
                    break


def key_names(key: Key) -> tuple[str, ...]:
    """All identities that a key mentions."""
    return tuple(name for part in key for name in part)


def when_names(when: When) -> tuple[str, ...]:
    return (*when.present, *when.absent, *(name for name, _ in when.equals))


def per_second(rate: Rate) -> Fraction:
    return Fraction(rate.count * 1_000_000, rate.period)


def limits_of(fields: ParsedFields, rule: Rule) -> Iterator[tuple[Limits, SourcePosition]]:
    """Every set of limits that a key of a rule may have, with its position."""
    node = fields.at("limit")
    if not isinstance(rule.limit, Tiers):
        yield rule.limit, node.position
    else:
        yield from ((limits, node.child(value).position) for value, limits in rule.limit.limits)
        if node.child("default") is not node:
            yield rule.limit.otherwise, node.child("default").position
    yield from ((entry.limits, entry.limit_node.position) for entry in fields.get("override", ()))


def largest_burst(fields: ParsedFields, rule: Rule) -> int | None:
    """The most requests that some key of a rule may make at once; None: any number."""
    bursts = [burst_of(limits, rule.cost.units) for limits, _ in limits_of(fields, rule)]
    bounded = [burst for burst in bursts if burst is not None and rule.overrides is None]
    return max(bounded) if len(bounded) == len(bursts) else None


def normalize_value(identity: Identity | None, value: str) -> str:
    """A value as an identity gives it: addresses as they are counted, path segments in lower case."""
    if isinstance(identity, ClientIp):
        address = read_address(value.partition("/")[0])
        return value if address is None else identity.key_of(address)
    if isinstance(identity, Captured):
        return normalize_path("/" + value)[1:] or value
    return value


def exempts(exemption: Exemption, rule: Rule) -> bool:
    if exemption.rules and rule.name not in exemption.rules:
        return False
    return all(any(covers(wide, narrow) for wide in exemption.match) for narrow in rule.match or (Match(),))
