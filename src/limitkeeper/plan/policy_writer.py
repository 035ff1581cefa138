"""Writes a plan as a policy file that `limitkeeper policy check` accepts.

Every share is one rule (`key: everyone`): a class of clients has the identity of its name (`partner` is present), the last class
takes those without any. The rule `capacity` bounds all clients together, also where shares are over-subscribed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from ..errors import ConfigurationError
from .limit_plan import IDENTITIES, Plan
from .limit_shares import Split
from .quantities import rate_text, rps

#: Names that no class can have: identities of the file, and YAML's constants.
RESERVED = ("ip", "plan", "internal", "null", "true", "false")
#: Names of the class of clients without an identity.
DEFAULT_CLASSES = ("public", "rest", "others", "anonymous")


def policy_text(plan: Plan) -> str:
    """The policy file of a plan."""
    lines = [
        f"# Written by `limitkeeper plan`, for {rps(plan.limit)} in all. Check it with `limitkeeper policy check`, and begin",
        "# with `on_refusal: shadow` on each rule: it counts what it would refuse, and refuses nothing.",
        f"name: {identifier(plan.name)}",
        store_line(plan),
    ]
    if plan.capacity is not None:
        lines += [f"instances: {plan.capacity.pods}", f"safe_concurrency: {plan.capacity.concurrency}"]
    lines += ["", "identify:                         # headers can be forged: name a verified source (jwt, certificate)"]
    lines += [f"  {name}: {source}" for name, source in identities(plan).items()]
    return "\n".join([*lines, "", "limits:", *rules(plan)]) + "\n"


def store_line(plan: Plan) -> str:
    """Several instances must share a store, which the planner can't know."""
    pods = 1 if plan.capacity is None else plan.capacity.pods
    if pods > 1:
        return f"# store: redis://host             # write it before use: the {pods} instances must count together"
    return "store: memory://                  # several workers: shared:///path; several machines: redis://host"


def identifier(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "share"


def class_identities(plan: Plan) -> list[str]:
    """The classes of clients that an identity marks: all but the one without an identity."""
    shares = [] if plan.classes is None else plan.classes.shares
    for share in shares:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", share.name) or share.name.lower() in RESERVED:
            raise ConfigurationError(
                f"{share.name!r} can't name a class of clients; write letters, digits and '-', as in partner"
            )
    names = [identifier(share.name) for share in shares]
    if len({*names}) < len(names):
        raise ConfigurationError(f"{', '.join(names)}: two classes have the same name; rename one of them")
    defaults = [name for name in names if name in DEFAULT_CLASSES]
    if len(defaults) > 1:
        raise ConfigurationError(f"{' and '.join(defaults)} are both the clients without an identity; rename one of them")
    return [name for name in names if name not in defaults]


def identities(plan: Plan) -> dict[str, str]:
    """Each identity of the file with its source."""
    names = dict.fromkeys([*class_identities(plan), *(key.identity for key in plan.per_key), *["internal"] * bool(plan.internal)])
    found = {name: f"{{header: {IDENTITIES.get(name, f'X-{name.title()}')}}}" for name in names}
    tiers = [tier for key in plan.per_key for tier, _ in key.tiers if tier]
    if tiers:
        found["plan"] = f"{{header: X-Plan, default: {tiers[0]}}}"
    return found or {"user": "{header: X-User}"}


def rules(plan: Plan) -> Iterator[str]:
    yield from rule("capacity", "all clients together", plan, bucket(plan.limit, plan.burst))
    before: list[str] = []
    external = "{absent: internal}" if plan.internal else ""
    if plan.internal:
        limit = bucket(plan.internal, plan.internal_burst)
        yield from rule("internal", "internal jobs", plan, limit, when="{present: internal}")
        before.append("internal")
    marked = class_identities(plan)
    for share in sorted(plan.classes.shares if plan.classes else (), key=lambda share: identifier(share.name) not in marked):
        name = identifier(share.name)
        absent = f"absent: [{', '.join(before)}]" if before else ""
        present = f"present: {name}" if name in marked else ""
        when = ", ".join(filter(None, (present, absent)))
        text = f"{share.name}: a share of {rps(plan.external)}{oversubscribed(plan.classes)}"
        limit = bucket(share.rate, plan.classes.burst_of(share, plan.burst)) if plan.classes else ""
        yield from rule(f"share-{name}", text, plan, limit, when=f"{{{when}}}" if when else "")
        if name in marked:
            before.append(name)
    for number, share in enumerate(plan.endpoints.shares if plan.endpoints else (), 1):
        burst = plan.endpoints.burst_of(share, plan.burst) if plan.endpoints else 1
        text = f"a share of {rps(plan.external)}{oversubscribed(plan.endpoints)}"
        name = f"endpoint-{number}-{identifier(share.name)}"
        yield from rule(name, text, plan, bucket(share.rate, burst), when=external, match=(share.name,))
    for key in plan.per_key:
        limits = [(tier, bucket(rate, plan.key_burst(rate))) for tier, rate in key.tiers]
        tiers = ", ".join(f"{tier}: {limit}" for tier, limit in limits)
        limit = f"{{by: plan, {tiers}, default: {limits[0][1]}}}" if limits[0][0] else limits[0][1]
        text = f"fairness: what one {key.identity} may take"
        if key.identity != "user" or marked:
            yield from rule(f"per-{key.identity}", text, plan, limit, when=external, key=key.identity)
        if key.identity == "user":  # a class of clients may send everything from one address
            known = [*["internal"] * bool(plan.internal), *["user"] * bool(marked), *marked]
            name, named = ("per-address", "ip") if marked else ("per-user", "user | ip")
            when = f"{{absent: [{', '.join(known)}]}}" if known else ""
            text = "fairness: what one address without an identity may take" if marked else text
            yield from rule(name, text, plan, limit, when=when, key=named)


def oversubscribed(shares: Split | None) -> str:
    if shares is None or not shares.oversubscribed:
        return ""
    return f"; OVER-SUBSCRIBED on request: all shares add up to {rps(shares.total)}"


def bucket(rate: Fraction, burst: int) -> str:
    return f"token bucket {rate_text(rate)} burst {burst}"


def rule(
    name: str, description: str, plan: Plan, limit: str, *, when: str = "", key: str = "everyone", match: tuple[str, ...] = ()
) -> Iterator[str]:
    """The lines of one rule."""
    found = match or plan.match
    yield f"  - name: {name}"
    yield f"    description: {quoted(description)}"
    if found:
        yield f"    match: [{', '.join(quoted(one) for one in found)}]" if len(found) > 1 else f"    match: {quoted(found[0])}"
    for field, value in (("when", when), ("key", key), ("limit", limit)):
        if value:
            yield f"    {field}: {value}"


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
