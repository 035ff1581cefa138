"""The Lua mirror of every rule against the rule itself, on states of every kind, those at the edge of 2^53 too."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import FixedWindow, LeakyBucket, LeakyBucketQueue, Limit, SlidingWindowCounter, SlidingWindowLog, TokenBucket
from limitkeeper.algorithms.constants import MAX_WAIT, TOP
from limitkeeper.stores.redis.limit_and_state_codec import rule_of
from limitkeeper.stores.redis.script_builder import sections
from limitkeeper.testing.strategies import limits
from servers.valkey import Valkey

NOW_US = 1_700_000_123_456_789
PACED = (TokenBucket, LeakyBucket, LeakyBucketQueue)
#: A soak tries more.
EXAMPLES = effort(60)


@pytest.fixture(scope="module")
def rule(valkey: Valkey) -> Callable[..., Any]:
    """Runs many cases of one mirrored function in one call: (limit's numbers, other numbers) in, numbers out."""
    client = valkey.client()

    def run(limit: Limit, name: str, count: int, cases: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        file = rule_of(limit).file
        parts = [text for section, text in sections(file).items() if section != "traits"]
        function = {"decide": file, "give_back": f"{file}_give_back", "redate": f"{file}_redate", "used": f"{file}_used"}[name]
        numbers = [getattr(limit, field) for field in rule_of(limit).fields]
        numbers += [0] * (4 - len(numbers))
        width = 4 + len(cases[0])
        names = ", ".join(f"v{i}" for i in range(width))
        outs = ", ".join(f"w{i}" for i in range(count))
        driver = f"""
            local out, at, n = {{}}, 1, 0
            local {names}
            while at <= #ARGV[1] do
              {names}, at = struct.unpack('<{"d" * width}', ARGV[1], at)
              local {outs} = {function}({names})
              n = n + 1
              out[n] = struct.pack('<{"d" * count}', {outs})
            end
            return table.concat(out)"""
        body = b"".join(struct.pack(f"<{width}d", *numbers, *case) for case in cases)
        reply = client.eval("\n".join([*parts, driver]), 0, body)
        whole = [tuple(map(int, answer)) for answer in struct.iter_unpack(f"<{count}d", reply)]
        assert all(float(n).is_integer() for answer in struct.iter_unpack(f"<{count}d", reply) for n in answer)
        return whole

    return run


class Draw:
    """Numbers for a limit, from a seed: many cases are sent in one call, and each is shown whole when it fails."""

    def __init__(self, limit: Limit, seed: int) -> None:
        self.limit = limit
        self.random = Random(seed)
        self.now = NOW_US // limit.tick
        window = limit.window if limit.gain == 0 else max(1, limit.period // limit.tick)
        self.marks = (0, 1, window, window // limit.count, 2 * window, 10 * window, 10**15 // limit.tick)
        self.levels = (0, limit.full, limit.full + limit.unit, 2 * limit.full, TOP, TOP - limit.unit, TOP // 2)

    def near(self, marks: Sequence[int], most: int = TOP) -> int:
        """A number at a mark, beside one, or anywhere below it."""
        mark = min(most, self.random.choice(marks))
        found = self.random.choice((mark, mark + self.random.randint(-3, 3), self.random.randint(0, mark)))
        return max(0, min(most, found))

    def span(self) -> int:
        """A length of time in ticks."""
        return self.near(self.marks, TOP // 4)

    def ahead(self) -> int:
        """How far ahead something is charged: never further than the rule can count."""
        return min(self.span(), self.limit.horizon) if self.limit.gain else self.span()

    def state(self) -> tuple[int, int, int]:
        """A state that the rule could meet: before now and after it, in debt, far ahead."""
        limit, now = self.limit, self.now
        if limit.gain:
            third = self.near(self.levels) if isinstance(limit, LeakyBucketQueue) else self.random.choice((0, now + self.ahead()))
            return self.random.choice((max(0, now - self.span()), now)), self.near(self.levels), third
        window = max(0, now + self.random.choice((-1, 0, 1)) * self.span())
        if limit.aligned:
            window -= window % limit.window
        most = limit.horizon if isinstance(limit, SlidingWindowCounter) else TOP // 2
        used, before = (self.near((0, 1, limit.count, most), most) for _ in range(2))
        if isinstance(limit, FixedWindow):
            before = self.random.choice((before, -1, -2, -3))
        return window, used, before

    def decision(self) -> tuple[int, ...]:
        """(a, b, c, now, not_before, cost, max_wait)"""
        size = self.limit.capacity
        cost = self.random.choice((0, 1, 1, 2, size - 1, size, size + 1, 4 * 10**18))
        wait = self.random.choice((0, self.span(), MAX_WAIT // self.limit.tick))
        return (*self.state(), self.now, self.now + self.random.choice((0, self.span())), cost, wait)

    def give_back(self) -> tuple[int, ...]:
        """(a, b, c, now, cost, charged, charged_at)"""
        size = self.limit.capacity
        cost = self.random.choice((0, 1, 2, size, size + 1, -1, -size, -(10**15)))
        charged = max(cost, self.random.choice((1, 2, size)))
        moment = self.random.choice((max(0, self.now - self.span()), self.now + self.ahead()))
        return (*self.state(), self.now, cost, charged, self.random.choice((-1, moment, moment, self.now)))


def exact(numbers: Any) -> bool:
    """Whether all of these are below `verdict.TOP`, as for a rule's numbers."""
    return all(abs(number) <= TOP for number in numbers)


@pytest.mark.parametrize("algorithm", [*PACED, FixedWindow, SlidingWindowCounter])
@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_decide_is_the_same_in_lua(rule: Callable[..., Any], algorithm: type[Limit], data: Any, seed: int) -> None:
    """The mirror answers with the same state, start, retry, remaining and reset, to the last bit."""
    limit = data.draw(limits(algorithm))
    draw = Draw(limit, seed)
    cases = [draw.decision() for _ in range(200)]
    compared = 0
    for case, result in zip(cases, rule(limit, "decide", 7, cases), strict=True):
        a, b, c, now, not_before, cost, max_wait = case
        answer = limit.decide((a, b, c), now, cost, max_wait, not_before)
        start, retry, reset = answer[3], answer[4] - now, answer[6] - now
        if exact((*answer[:4], answer[5], retry, reset)):
            compared += 1
            expected = (*answer[:3], start - now if start >= 0 else start, retry, answer[5], reset)
            assert result == expected, (str(limit), case)
    assert compared > 100


@pytest.mark.parametrize("algorithm", [*PACED, FixedWindow, SlidingWindowCounter])
@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_give_back_is_the_same_in_lua(rule: Callable[..., Any], algorithm: type[Limit], data: Any, seed: int) -> None:
    """The mirror leaves the same state behind, whatever is given back, of whatever charge, or charged on top."""
    limit = data.draw(limits(algorithm))
    draw = Draw(limit, seed)
    cases = [draw.give_back() for _ in range(200)]
    compared = 0
    for case, result in zip(cases, rule(limit, "give_back", 3, cases), strict=True):
        a, b, c, now, cost, charged, charged_at = case
        expected = limit.give_back((a, b, c), now, cost, charged_at, charged)
        if exact(expected):
            compared += 1
            assert result == tuple(expected), (str(limit), case)
    assert compared > 100


@pytest.mark.parametrize("algorithm", [*PACED, FixedWindow, SlidingWindowCounter])
@EXAMPLES
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_used_is_the_same_in_lua(rule: Callable[..., Any], algorithm: type[Limit], data: Any, seed: int) -> None:
    """The mirror counts the same units as used, of every state."""
    limit = data.draw(limits(algorithm))
    draw = Draw(limit, seed)
    cases = [(*draw.state(), draw.now) for _ in range(200)]
    for case, (result,) in zip(cases, rule(limit, "used", 1, cases), strict=True):
        assert result == limit.used(case[:3], case[3]), (str(limit), case)


def test_division_is_exact_below_2_53(valkey: Valkey) -> None:
    """(a − a % b) / b of Lua's doubles is Python's a // b, also where the quotient lies just below a whole number."""
    client = valkey.client()
    script = """local out, at, a, b = {}, 1
        while at <= #ARGV[1] do
          a, b, at = struct.unpack('<dd', ARGV[1], at)
          out[#out + 1] = struct.pack('<dd', (a - a % b) / b, a % b)
        end
        return table.concat(out)"""
    random = Random(53)
    pairs = []
    for _ in range(20_000):
        b = random.choice((random.randint(1, 10**9), random.randint(1, TOP), random.randint(1, 100)))
        a = random.choice((random.randint(0, TOP), TOP - random.randint(0, 2000)))
        pairs.append((min(TOP, max(0, a // b * b + random.randint(-2, 2))), b))
    reply = client.eval(script, 0, b"".join(struct.pack("<dd", *pair) for pair in pairs))
    assert [(int(q), int(r)) for q, r in struct.iter_unpack("<dd", reply)] == [divmod(a, b) for a, b in pairs]


# The log: its state is no three numbers ----------------------------------------------------------------------------------

LOG_DRIVER = """
local at, rule, window, count, now, x, y, cost, n = 1
local out = {}
while at <= #ARGV[1] do
  rule, window, count, now, x, y, cost, n, at = struct.unpack('<dddddddd', ARGV[1], at)
  local raw = struct.pack('<dddd', 0, 0, 0, n) .. string.sub(ARGV[1], at, at + 16 * n - 1)
  at = at + 16 * n
  local log = open_log(raw)
  local a, b, c, start, retry, left, reset
  if rule == 0 then
    a, b, c, start, retry, left, reset = sliding_log(window, count, 0, 0, 0, 0, log, now, x, cost, y)
    if start >= 0 and cost > 0 then c = add_entry(window, c, now, a, b) end
  else
    a, b, c = sliding_log_give_back(window, count, 0, 0, 0, 0, log, now, cost, cost, x)
    if b > 0 then c = add_entry(window, c, now, a, b) end
    start, retry, left, reset = 0, 0, 0, 0
  end
  local value = close_log(0, 0, c, 0, 0)
  out[#out + 1] = struct.pack('<ddddd', start, retry, left, reset, #value) .. value
end
return table.concat(out)"""


def log_case(draw: Draw) -> Any:
    """(which, now, x, y, cost, entries): decide with not_before and max_wait, or give back with charged_at."""
    limit, random = draw.limit, draw.random
    window = limit.window
    marks = (-window, -window + 1, -window - 1, 0, 1, -2 * window, window)
    moments = {random.choice((random.choice(marks), random.randint(-2 * window, window))) for _ in range(random.randint(0, 12))}
    entries = [(NOW_US + offset, random.choice((1, 2, 5, limit.count))) for offset in sorted(moments)]
    if random.random() < 0.4:
        charged_at = random.choice([-1, NOW_US, *[moment for moment, _ in entries]])
        return 1, NOW_US, charged_at, 0, random.choice((0, 1, 2, 3, limit.count, -1, -7)), entries
    late, wait = random.choice((0, draw.span())), random.choice((0, draw.span()))
    return 0, NOW_US, NOW_US + late, wait, random.choice((0, 1, 2, 3, limit.count, limit.count + 1)), entries


@EXAMPLES
@given(limits(SlidingWindowLog), st.integers(0, 2**32))
def test_the_log_is_the_same_in_lua(valkey: Valkey, limit: Limit, seed: int) -> None:
    """The same answers, and the same entries left, when a log is decided, charged, given back to, pruned and written."""
    draw = Draw(limit, seed)
    cases = [log_case(draw) for _ in range(50)]
    source = "\n".join([text for name, text in sections("sliding_log").items() if name != "traits"] + [LOG_DRIVER])

    reply, at = valkey.client().eval(source, 0, b"".join(packed_log_case(limit, *case) for case in cases)), 0
    for which, now, x, y, cost, entries in cases:
        *result, size = map(int, struct.unpack_from("<5d", reply, at))
        left = read_entries(reply[at + 40 : at + 40 + size])
        at += 40 + size
        if which == 0:
            state, _, _, start, retry, remaining, reset = limit.decide((tuple(entries), 0, 0), now, cost, y, x)
            expected = [start - now if start >= 0 else start, retry - now, remaining, reset - now]
            assert (result, left) == (expected, state), (str(limit), now, x, y, cost, entries)
        else:
            assert left == limit.give_back((tuple(entries), 0, 0), now, cost, x)[0], (str(limit), x, cost, entries)


def packed_log_case(limit: Limit, which: int, now: int, x: int, y: int, cost: int, entries: list[tuple[int, int]]) -> bytes:
    numbers, total = [which, limit.window, limit.count, now, x, y, cost, len(entries)], 0
    for moment, one in entries:
        total += one
        numbers += [moment, total]
    return struct.pack(f"<{len(numbers)}d", *numbers)


def read_entries(value: bytes) -> tuple[tuple[int, int], ...]:
    numbers = list(map(int, struct.unpack(f"<{len(value) // 8}d", value)))
    found, total = [], numbers[2]
    for moment, upto in zip(numbers[4::2], numbers[5::2], strict=True):
        found.append((moment, upto - total))
        total = upto
    return tuple(found)
