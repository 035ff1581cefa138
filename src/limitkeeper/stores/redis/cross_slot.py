"""A decision over several slots of a cluster: charges every slot, then keeps all charges or gives all of them back.

No script may touch two slots, so a decision over, say, a user and a tenant has two steps where one limit refuses:

1. Every slot charges its own claims (one write per node). All of them allow it now: done, in one round trip.
2. One refuses: those that were charged give it back and report what is there. Starts differ: those with an earlier one give back
   and decide again, in one script call, not before the latest start of all; this is repeated until all have the same.

Between the two steps others may see the charge and be refused because of it, never admitted. A caller that dies in between
leaves at most the costs of this one decision charged, in the slots that had allowed it: too strict, never too lax. Times are
compared as waits, since every node has its own clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...algorithms.claim import Claim
from ...decision import Decision, Decisions
from ...errors import StoreError, StoreUnavailable
from ..sans_io import Plan
from .cluster import slot_of
from .command_routing import Route
from .key_names import KeyNames
from .script_request import DecideRequest, GiveBackRequest, HitRequest, encode_decide

#: How often a common start is looked for while other callers take theirs.
ROUNDS = 12


class SlotGroup:
    """The claims of one slot, and their latest decision."""

    decision: Decision

    def __init__(self, claims: list[Claim], positions: list[int]) -> None:
        self.claims = claims
        self.positions = positions  # of the claims in the whole decision
        self.now_us: int | None = None  # the node's time when it was first asked
        self.charged = False

    def update(self, decision: Decision, stored: bool) -> None:
        if self.now_us is None:
            self.now_us = decision.start_us - decision.wait_us
        self.decision = decision
        self.charged = stored and decision.allowed

    def wait_of(self, decision: Decision) -> int:
        """The wait of a decision, counted from when the group was first asked."""
        return decision.start_us - (self.now_us or 0)

    @property
    def wait_us(self) -> int:
        return self.wait_of(self.decision)


def groups_of(names: KeyNames, claims: Sequence[Claim]) -> list[SlotGroup]:
    """Claims by slot, in order."""
    found: dict[int, list[int]] = {}
    for at, claim in enumerate(claims):
        found.setdefault(slot_of(names.key(claim.named, claim.key)), []).append(at)
    return [SlotGroup([claims[at] for at in positions], positions) for positions in found.values()]


class CrossSlotDecision:
    """One decision over several slots; `decide` is a plan. `now_us`: the time that requests carry, None: the servers'."""

    def __init__(
        self,
        route: Route,
        names: KeyNames,
        claims: Sequence[Claim],
        wait_us: int,
        commit: bool,
        not_before_us: int,
        now_us: int | None,
    ) -> None:
        self._route, self._names, self._claims = route, names, claims
        self._commit, self._not_before_us, self._now_us = commit, not_before_us, now_us
        self._wait_us = wait_us if all(claim.named.limit.reserves for claim in claims) else 0
        self._groups = groups_of(names, claims)

    def _request(self, group: SlotGroup, commit: bool, not_before_us: int) -> HitRequest | DecideRequest:
        """Every charge remembers the states around it, so that it can be undone exactly."""
        return encode_decide(self._names, group.claims, self._wait_us, commit, self._now_us, not_before_us, remember=commit)

    def _give_back(self, group: SlotGroup) -> GiveBackRequest:
        return GiveBackRequest(self._names, group.claims, group.decision.start_us, self._now_us)

    def decide(self) -> Plan[Decision]:
        groups = self._groups
        yield from self._update(groups, False, self._commit, [self._not_before_us] * len(groups))
        for _ in range(ROUNDS):
            if not all(group.decision.allowed for group in groups):
                yield from self._withdraw()
                return self._joined(False)
            latest = max(group.wait_us for group in groups)
            early = [group for group in groups if group.wait_us < latest]
            if not early or not self._commit:
                return self._joined(True)
            yield from self._update(early, True, True, [(group.now_us or 0) + latest for group in early])
        yield from self._withdraw()
        raise StoreUnavailable(f"no common start was found in {ROUNDS} rounds: too many callers use these keys; try again")

    def _withdraw(self) -> Plan[None]:
        """Gives back what was charged, and peeks at what is there then."""
        charged = [group for group in self._groups if group.charged]
        if charged:
            yield from self._update(charged, True, False, [self._not_before_us] * len(charged))

    def _update(self, groups: Sequence[SlotGroup], undo: bool, commit: bool, not_before_us: Sequence[int]) -> Plan[None]:
        """Decides again for some groups (`undo`: after giving back). If one fails, the others give back what they charged."""
        decides = [self._request(group, commit, moment) for group, moment in zip(groups, not_before_us, strict=True)]
        backs = [self._give_back(group) for group in groups] if undo else []
        requests = [one for pair in zip(backs, decides, strict=True) for one in pair] if undo else decides
        errors: list[StoreError | None] = (yield from self._route.execute(requests))[int(undo) :: 1 + int(undo)]
        failed: StoreError | None = None
        for group, request, error in zip(groups, decides, errors, strict=True):
            if error is None:
                group.update(request.answer, commit)
            else:
                group.charged = False
                failed = failed or error
        if failed is not None:
            charged = [group for group in self._groups if group.charged]
            if charged:
                yield from self._route.execute([self._give_back(group) for group in charged])
            raise failed

    def _joined(self, allowed: bool) -> Decision:
        parts: dict[int, Decision] = {}
        for group in self._groups:
            for position, part in zip(group.positions, group.decision.decisions, strict=True):
                if allowed:
                    fields = (part.limit, part.remaining, part.retry_us, part.reset_us, group.wait_of(part), part.start_us)
                    part = Decision(True, *fields, part.name)
                parts[position] = part
        return Decisions.join([parts[position] for position in range(len(parts))])
