"""DistributedBulkhead against a model: which places count is always exactly known, through renewals and crashes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from limitkeeper import MemoryStore
from limitkeeper.concurrency import DistributedBulkhead
from limitkeeper.testing import ManualClock

SIZE, TTL = 3, 30
PROCESSES = st.integers(0, 1)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["take", "free", "renew", "crash"]), PROCESSES),
    st.tuples(st.just("advance"), st.integers(1, 12)),
    st.tuples(st.just("resize"), st.integers(1, 5)),
)


@given(st.lists(STEPS, max_size=60))
def test_places_are_counted_exactly(steps):
    """A place counts from its date for the ttl, whoever holds it; a place is given exactly while fewer than the size count."""
    clock, now, size = ManualClock(1_000_000), 0, SIZE
    store = MemoryStore(clock=clock)
    made = [DistributedBulkhead(SIZE, store, name="db", ttl=TTL) for _ in range(2)]
    held: list[list[int]] = [[], []]  # the dates of the places of each process, the oldest first
    lost: list[int] = []  # of crashed processes
    for step, which in steps:
        counted = [date for date in (*held[0], *held[1], *lost) if now - date < TTL]
        if step == "take":
            assert made[which].try_acquire() == (len(counted) < size)
            held[which] += [now] if len(counted) < size else []
        elif step == "free" and held[which]:
            made[which].release()
            held[which].pop(0)
        elif step == "renew":
            due = [date for date in held[which] if date <= now - TTL / 3]
            assert made[which].renew() == len(due)
            held[which] = held[which][len(due) :] + [now] * len(due)
        elif step == "crash":
            lost += held[which]
            held[which] = []
            made[which].close()  # its renewals end
            made[which] = DistributedBulkhead(size, store, name="db", ttl=TTL)
        elif step == "advance":
            clock.advance(which)
            now += which
        elif step == "resize":
            size = which
            for one in made:
                one.resize(size)
        assert [one.in_use for one in made] == [len(each) for each in held]
        counted = [date for date in (*held[0], *held[1], *lost) if now - date < TTL]
        assert made[0].taken() == min(size, len(counted))
    for one in made:
        one.close()
