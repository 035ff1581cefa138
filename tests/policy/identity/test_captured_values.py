"""Keys from a path: one value has one key, however it is spelt, and a path with several readings gets none of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import MemoryStore
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.policy.identity.identify import SEVERAL, Captured
from limitkeeper.policy.identity.paths import canonical_value
from limitkeeper.testing import ManualClock

UUID = "12345678-1234-5678-1234-56781234567a"


@pytest.fixture
def gate():
    policy = Policy.of(
        identify={"order": {"path": "order"}, "tenant": {"path": "tenant"}},
        limits=[
            {"name": "order", "match": "/orders/{order}", "key": "order", "limit": "fixed window 2/min"},
            {"name": "tenant", "match": "/t/{tenant}/**", "key": "tenant", "limit": "fixed window 2/min"},
        ],
    )
    with Gate(policy, store=MemoryStore(clock=ManualClock())) as gate:
        yield gate


def passed(gate, paths):
    return sum(gate.ask(WrittenRequest("GET", path)).allowed for path in paths)


@pytest.mark.parametrize(
    "values",
    [
        ["7", "07", "+7", "7.0", "7.", "00007", "7e0", "\uff17", "\u0667", "0_7", "70e-1", " 7", "7%20", "%37"],
        ["-7", "-07", "-7.0", "-007"],
        ["0", "00", "-0", "+0.0", "0e5"],
        ["7.5", "07.50", "+7.5", "75e-1"],
        ["100", "1_00", "1e2", "+100", "100.00"],
        [UUID, UUID.upper(), UUID.replace("-", ""), f"{{{UUID}}}", f"urn:uuid:{UUID}"],
        ["abc", "ABC", "%61bc", "abc%00", "abc;v=1"],
    ],
    ids=lambda values: values[0],
)
def test_a_value_has_one_key(gate, values):
    """Whatever an application converts to the same value shares one limit of two."""
    assert passed(gate, [f"/orders/{value}" for value in values * 3]) <= 2 + 2 * (SEVERAL in keys(gate, values))
    assert keys(gate, values) <= {canonical_value(values[0].casefold()), SEVERAL}


def keys(gate, values):
    contexts = [WrittenRequest("GET", f"/orders/{value}") for value in values]
    for context in contexts:
        gate.compiled.match(context)
    return {Captured("order").of(context) for context in contexts}


def test_other_values_have_other_keys(gate):
    """Plain identifiers keep their text, however long: none of them is taken for another one."""
    values = [
        "7",
        "70",
        "700",
        "8",
        "a7",
        "7a",
        "1.5",
        "1-5",
        "10" * 15,
        "10" * 30,
        "10" * 30 + "1",
        "e5",
        "5e",
        ".",
        "_",
        "",
        "nan",
    ]
    values = [value for value in values if value not in (".", "")]
    assert len(keys(gate, values)) == len(values)
    assert {"7", "70", "700", "10" * 30 + "1"} <= keys(gate, values)


def test_a_path_with_several_readings_has_no_key_of_its_own(gate):
    """`/t/acme/../k1/x` acts on acme in some applications and on k1 in others: all such requests share one key."""
    assert passed(gate, [f"/t/acme/../k{number}/x" for number in range(50)]) == 2
    assert passed(gate, [f"/t/acme/%2e%2e/k{number}/x" for number in range(50)]) == 0
    assert passed(gate, ["/t/acme/x"] * 3) == 2


@effort(300)
@given(st.text(max_size=30) | st.from_regex(r"[+-]?[0-9_]{0,6}\.?[0-9]{0,4}(e[+-]?[0-9]{0,5})?", fullmatch=True))
def test_a_canonical_value_stays_one(text):
    """Any text has a canonical value, whose own is itself."""
    once = canonical_value(text)
    assert canonical_value(once) == once


def test_a_number_of_32_digits_is_written_in_one_way():
    """However it is spelled, it is written as a UUID."""
    assert {canonical_value(text) for text in ("1" + "0" * 31, "10000e27", f"+1{'0' * 31}")} == {
        "10000000-0000-0000-0000-000000000000"
    }


@given(st.integers().filter(lambda number: len(str(number)) != 32))
def test_an_integer_is_written_in_one_way(number):
    """Every spelling that Python converts to the same integer is that integer's text."""
    for text in (str(number), f"{number:_}", f" {number} ", f"{number}.0", f"{number:+d}", f"{number:030d}"):
        assert canonical_value(text) == str(number)
