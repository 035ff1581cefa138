"""The gate against a slow model once more: tiers, overrides, costs, outcomes, repetitions and shadow, in any mixture.

The model keeps one list of marks and uses a store of its own, one rule after the other, in reading order.
"""

from __future__ import annotations

from gates import asked, key, rule
from hypothesis import given, settings
from hypothesis import strategies as st

from limitkeeper import MemoryStore
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.algorithms.limit_parser import parse_limits
from limitkeeper.policy import Gate, WrittenRequest
from limitkeeper.policy.identity.identify import Header
from limitkeeper.policy.model import SHADOW, Charge, Cost, Once, OnRefusal, Policy, Tiers
from limitkeeper.testing import ManualClock
from stand_ins import NOON

LIMITS = ("token bucket 2/s burst 4", "fixed window 5/min", "sliding window log 4 per 10 s", "9/s; fixed window 6/min")
OWN, PRO = tuple(parse_limits("fixed window 3/min")), tuple(parse_limits("fixed window 8/min"))
REPLAYS, KEEP = 2, 20.0
RULES = st.lists(
    st.fixed_dictionaries(
        {"limit": st.sampled_from(LIMITS), "key": st.sampled_from(["user", "user|ip", ""])}
        | {word: st.booleans() for word in ("share", "override", "tiers", "cost", "charge", "once", "shadow")}
    ),
    min_size=1,
    max_size=3,
)
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["u1", "u1", "u2", None]),
        st.sampled_from([None, None, "pro"]),
        st.sampled_from([None, "0", "2", "99", "x"]),
        st.sampled_from(["k1", "k1", "k2", None]),
        st.sampled_from([401, 200]),
        st.sampled_from([0.0, 0.0, 0.3, 1.0, 15.0]),
    ),
    min_size=10,
    max_size=30,
)


def made(number, said):
    limits = tuple(parse_limits(said["limit"]))
    return rule(
        f"r{number}",
        Tiers("plan", (("pro", PRO),), limits) if said["tiers"] else limits,
        key=key(said["key"]) if said["key"] else (),
        unidentified="share" if said["share"] else "skip",
        override=(("u1", OWN),) if said["override"] and said["key"] else (),
        cost=Cost("header", 1, "x-cost", most=3) if said["cost"] else Cost(),
        charge=Charge(((401, 401),)) if said["charge"] else Charge(),
        once=Once("idempotency-key", round(KEEP * 1e6), REPLAYS) if said["once"] else None,
        on_refusal=OnRefusal(SHADOW) if said["shadow"] else OnRefusal(),
    )


class Model:
    """The straightforward evaluation of rules, with a list of marks and one store."""

    def __init__(self, said):
        self.said = list(enumerate(said))
        self.clock = ManualClock(NOON)
        self.store = MemoryStore(clock=self.clock)
        self.marks: dict[tuple[int, str, str], tuple[int, float]] = {}  # (times used, until when)

    def claims(self, number, said, user, plan, received):
        """The claims of one rule; None: it does not apply."""
        if not said["key"]:
            name = "*"
        elif user is not None:
            name = user if said["key"] == "user" else f"user:{user}"
        elif said["key"] == "user|ip":
            name = "ip:192.0.2.7"
        elif said["share"]:
            name = "-"
        else:
            return None
        limits = tuple(parse_limits(said["limit"]))
        if said["key"] and said["override"] and user == "u1":
            limits = OWN
        elif said["tiers"] and plan == "pro":
            limits = PRO
        cost = {None: 1, "0": 1, "2": 2, "99": 3, "x": 3}[received] if said["cost"] else 1
        labels = [f"r{number}" + (f".{i + 1}" if i else "") for i in range(len(limits))]
        return [Claim(NamedLimit("m", label, limit), name, cost) for label, limit in zip(labels, limits, strict=True)]

    def ask(self, user, plan, received, idem, status):
        """Whether it passes, and which rules in shadow would have refused."""
        now = self.clock.now_us() / 1e6
        charged, shadows, new, again = [], [], [], []
        for number, said in self.said:
            claims = self.claims(number, said, user, plan, received)
            if claims is None:
                continue
            if said["shadow"]:
                shadows.append((number, said, claims))
                continue
            if said["once"] and idem:
                mark = (number, claims[0].key, idem)
                used, until = self.marks.get(mark, (0, 0.0))
                if until > now and 0 < used <= REPLAYS:
                    repeated = [
                        Claim(NamedLimit("m", f"{one.limit.name} replays", one.limit.limit), one.key, one.cost) for one in claims
                    ]
                    if (taken := self.store.decide(repeated)).allowed:  # the rule's limits once more, for repetitions
                        again.append((mark, repeated, taken))
                        continue
                if until <= now or used == 0:
                    new.append((mark, said))
            charged.append((said, claims))
        every = [claim for _, claims in charged for claim in claims]
        decision = self.store.decide(every) if every else None
        if decision is not None and not decision.allowed:
            for _, repeated, taken in again:
                self.store.give_back(repeated, taken.start_us)
            return False, ()
        for mark, _, _ in again:
            self.marks[mark] = (self.marks[mark][0] + 1, self.marks[mark][1])
        for mark, _ in new:
            self.marks[mark] = (1, now + KEEP)
        refused = [(n, s, claims, self.store.decide(claims)) for n, s, claims in shadows]
        if status != 401:  # a rule that counts failures gives the others back
            back = [claim for said, claims in charged for claim in claims if said["charge"]]
            if back:
                self.store.give_back(back, decision.start_us)
            for mark, said in new:
                if said["charge"]:
                    del self.marks[mark]
            for _, said, claims, told_in_shadow in refused:
                if said["charge"] and told_in_shadow.allowed:
                    self.store.give_back(claims, told_in_shadow.start_us)
        return True, tuple(f"r{n}" for n, _, _, told_in_shadow in refused if not told_in_shadow.allowed)


def facts_of(user, plan, received, idem):
    said = {"user": user, "plan": plan, "x-cost": received, "idempotency-key": idem}
    return WrittenRequest("GET", "/", headers={name: value for name, value in said.items() if value}, peer="192.0.2.7")


@settings(deadline=None)
@given(RULES, REQUESTS, st.sampled_from(["quick", "ask", "aask"]))
def test_any_mixture_of_features_decides_as_a_person_would(said, requests, mode):
    """Tiers, overrides, reported costs, outcomes, repetitions and shadow act together as each acts alone."""
    clock, model = ManualClock(NOON), Model(said)
    rules = tuple(made(number, one) for number, one in enumerate(said))
    gate = Gate(
        Policy(name="m", rules=rules, identify={name: Header(name) for name in ("user", "plan")}), store=MemoryStore(clock=clock)
    )
    for *received, status, pause in requests:
        clock.advance(pause)
        model.clock.advance(pause)
        evaluation = asked(gate, facts_of(*received), mode)
        assert (evaluation.allowed, evaluation.shadows) == model.ask(*received, status)
        if evaluation.allowed:
            evaluation.settle(status)
