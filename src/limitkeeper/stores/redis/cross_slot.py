"""A decision over several slots of a cluster: reserve everywhere, then keep all or give all back.

No script may touch two slots, so a decision over, say, a user and a tenant takes two steps where one refuses:

1. Every slot is asked to charge its own claims (one write for each node). All of them allow it now: done, in one trip.
2. One refuses: those that were charged give it back, and say what is there. Starts to come differ: those with an earlier one
   give back and ask again, in one script call, for the latest start of all; that is repeated until all have the same.

Between the two steps others may see the charge and be refused for its sake, never admitted for it. A caller that dies in
between leaves at most the costs of this one decision charged, in the slots that had allowed it: too strict, never too lax.
Times are compared as waits, since every node has a clock of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...algorithms.claim import Claim
from ...decision import Decision, Decisions
from ...errors import StoreError, StoreUnavailable
from .cluster import slot_of
from .key_names import KeyNames
from .operations import ScriptRequest, deciding, giving_back
from .trips import Plan

#: So often a common start is looked for while others take theirs.
ROUNDS = 12


class SlotGroup:
    """The claims of one slot, and what was told about them."""

    def __init__(self, claims: list[Claim], places: list[int]) -> None:
        self.claims = claims
        self.places = places  # where they stand in the decision
        self.decision: Any = None
        self.now_us = 0
        self.charged = False

    def told(self, decision: Decision, stored: bool) -> None:
        if self.decision is None:
            self.now_us = decision.start_us - decision.wait_us
        self.decision = decision
        self.charged = stored and decision.allowed

    @property
    def wait_us(self) -> int:
        """From when it was first asked to its start."""
        return int(self.decision.start_us) - self.now_us


def groups_of(names: KeyNames, claims: Sequence[Claim]) -> list[SlotGroup]:
    """Claims by slot, in order."""
    found: dict[int, list[int]] = {}
    for at, claim in enumerate(claims):
        found.setdefault(slot_of(names.key(claim.named, claim.key)), []).append(at)
    return [SlotGroup([claims[at] for at in places], places) for places in found.values()]


class CrossSlotDecision:
    """One decision over several slots. `answer` is a plan: it asks through `answered`, which tells an error for each ask."""

    def __init__(
        self, names: KeyNames, answered: Any, claims: Sequence[Claim], wait_us: int, commit: bool, now_us: int | None
    ) -> None:
        self.names, self.answered, self.claims, self.commit, self.now_us = names, answered, claims, commit, now_us
        self.wait_us = wait_us if all(claim.named.limit.reserves for claim in claims) else 0
        self.groups = groups_of(names, claims)

    def ask(self, group: SlotGroup, commit: bool, not_before_us: int = 0) -> ScriptRequest:
        """A charge remembers the states around it: given back before anybody else came, it leaves no trace."""
        return deciding(self.names, group.claims, self.wait_us, commit, self.now_us, not_before_us, remember=commit)

    def back(self, group: SlotGroup) -> ScriptRequest:
        return giving_back(self.names, group.claims, group.decision.start_us, self.now_us)

    def answer(self) -> Plan[Decision]:
        yield from self.tell(self.groups, [[self.ask(group, self.commit)] for group in self.groups], self.commit)
        for _ in range(ROUNDS):
            if not all(group.decision.allowed for group in self.groups):
                yield from self.withdraw()
                return self.joined(False)
            latest = max(group.wait_us for group in self.groups)
            early = [group for group in self.groups if group.wait_us < latest]
            if not early or not self.commit:
                return self.joined(True)
            asks = [[self.back(group), self.ask(group, True, group.now_us + latest)] for group in early]
            yield from self.tell(early, asks, True)
        yield from self.withdraw()
        raise StoreUnavailable(f"no common start was found in {ROUNDS} rounds: too many callers want these keys; try again")

    def withdraw(self) -> Plan[None]:
        """Gives back what was charged, and looks at what is there."""
        charged = [group for group in self.groups if group.charged]
        if charged:
            yield from self.tell(charged, [[self.back(group), self.ask(group, False)] for group in charged], False)

    def tell(self, groups: Sequence[SlotGroup], asks: Sequence[Sequence[ScriptRequest]], stored: bool) -> Plan[None]:
        """Asks for several groups at once. When one can't be asked, the others give back what they were charged."""
        flat = [ask for some in asks for ask in some]
        errors: list[StoreError | None] = yield from self.answered(flat)
        failed: StoreError | None = None
        at = 0
        for group, some in zip(groups, asks, strict=True):
            at += len(some)
            if errors[at - 1] is None:
                group.told(some[-1].answer, stored)
            else:
                group.charged = False
                failed = failed or errors[at - 1]
        if failed is not None:
            charged = [group for group in self.groups if group.charged]
            if charged:
                yield from self.answered([self.back(group) for group in charged])
            raise failed

    def joined(self, allowed: bool) -> Decision:
        """One Decision for all: refused, the limit with the longest retry speaks; allowed, the one closest to its end."""
        parts: list[Any] = [None] * len(self.claims)
        for group in self.groups:
            for place, part in zip(group.places, group.decision.decisions, strict=True):
                parts[place] = part
        speaker = parts[0]
        for part in parts[1:]:
            if allowed:
                if part.remaining * speaker.limit < speaker.remaining * part.limit:
                    speaker = part
            elif speaker.retry_us >= 0 and (part.retry_us < 0 or part.retry_us > speaker.retry_us):
                speaker = part
        wait = max(group.wait_us for group in self.groups) if allowed else 0
        now_us = self.groups[0].now_us
        told = (allowed, speaker.limit, speaker.remaining, speaker.retry_us, speaker.reset_us, wait, now_us + wait, speaker.name)
        return Decisions(parts, *told)
