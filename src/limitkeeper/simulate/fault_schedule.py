"""Fault schedules: what goes wrong, where, when and for how long, drawn from a seed; and the smallest part that still fails.

A schedule is its mode, its seed, and which of the seed's faults are kept. All else (nodes, limits, traffic, delays) follows
from mode and seed, so these three replay a run exactly. `shrink` is delta debugging (Zeller and Hildebrandt, 2002): it removes
halves, quarters … of the faults while the run still fails, until no single fault can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from .network import ANY

#: Seconds of traffic.
TRAFFIC_S = 4.0
LINKS = ("cut", "loss", "slow")
CRASHES = ("crash",)
CLOCKS = ("node clock", "server clock")
SERVERS = ("failover", "split")
MEMBERS = ("add", "remove", "rebalance")


class Fault(NamedTuple):
    """One fault. `amount` is a probability (loss), seconds (slow, clocks: the step; failover: the lag of the replica)."""

    at_s: float
    kind: str
    node: str = ANY
    server: str = ANY
    lasts_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        where = {ANY: "all"}
        link = f"{where.get(self.node, self.node)}–{where.get(self.server, self.server)}"
        lasts = f" for {self.lasts_s:.3f} s" if self.lasts_s else ""
        amount = f" ({self.amount:+.3f})" if self.amount else ""
        return f"{self.at_s:6.3f} s  {self.kind:12} {link}{lasts}{amount}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run: `faults` are those of the seed at the positions `kept`."""

    mode: str
    seed: int
    nodes: tuple[str, ...]
    servers: tuple[str, ...]
    faults: tuple[Fault, ...]
    kept: tuple[int, ...] = field(default=())

    @property
    def command(self) -> str:
        """Replays exactly this run."""
        only = "" if len(self.kept) == len(self.faults) else f" --only {','.join(map(str, self.kept)) or 'none'}"
        return f"python -m limitkeeper.simulate.faults --mode {self.mode} --seed {self.seed}{only}"

    def active(self) -> list[Fault]:
        return [self.faults[i] for i in self.kept]

    def only(self, kept: Sequence[int]) -> Schedule:
        return replace(self, kept=tuple(i for i in kept if i < len(self.faults)))


def make_schedule(mode: str, seed: int, nodes: int, servers: int, kinds: Sequence[str]) -> Schedule:
    """The faults of a seed, in order of time."""
    rng = Random(f"{mode} {seed} faults")
    names, stores = tuple(f"node{i}" for i in range(nodes)), tuple(f"server{i}" for i in range(servers))
    faults = sorted(draw_fault(rng, rng.choice(kinds), names, stores) for _ in range(rng.choice((0, 1, 2, 3, 4, 6, 9))))
    return Schedule(mode, seed, names, stores, tuple(faults), tuple(range(len(faults))))


def draw_fault(rng: Random, kind: str, nodes: Sequence[str], servers: Sequence[str]) -> Fault:
    at_s, lasts_s = round(rng.uniform(0.05, TRAFFIC_S), 3), round(min(2.5, rng.expovariate(3)), 3)
    node, server = rng.choice((*nodes, *nodes, ANY)), rng.choice((*servers, ANY))
    if kind in CLOCKS or kind in CRASHES or kind in MEMBERS:
        node = rng.choice(nodes)
    if kind not in LINKS:
        server = rng.choice(servers)
    amount = 0.0
    if kind == "loss":
        amount = rng.choice((0.1, 0.5, 1.0))
    elif kind == "slow":
        amount = rng.choice((0.01, 0.1, 0.5))
    elif kind in CLOCKS:
        amount, lasts_s = round(rng.choice((-1, 1)) * rng.choice((0.02, 0.2, 5.0)) * rng.random(), 3), 0.0
    elif kind in SERVERS:
        amount = round(rng.uniform(0, 0.3), 3)
    elif kind in MEMBERS:
        lasts_s = 0.0
    return Fault(at_s, kind, node, server, lasts_s, amount)


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The schedule with as few of its faults as still fail."""
    kept, parts = list(schedule.kept), 2
    if not kept or fails(schedule.only(())):
        return schedule.only(())
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        pieces = [kept[i : i + size] for i in range(0, len(kept), size)]
        rests = [[one for one in kept if one not in piece] for piece in pieces]
        smaller = next((rest for rest in rests if rest and fails(schedule.only(rest))), None)
        if smaller is not None:
            kept, parts = smaller, max(2, parts - 1)
        elif parts < len(kept):
            parts = min(len(kept), 2 * parts)
        else:
            break
    return schedule.only(kept)
