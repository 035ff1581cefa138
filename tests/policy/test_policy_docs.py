"""Every policy in docs/policy.md loads, and every field has its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from limitkeeper.policy import Policy
from limitkeeper.policy.reading.policy_sections import POLICY
from limitkeeper.policy.reading.rule_fields import RULE

PAGE = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("text", BLOCKS, ids=[str(number) for number in range(len(BLOCKS))])
def test_each_policy_of_the_page_loads(text, caplog):
    """A YAML block of docs/policy.md is a whole policy, without errors and without warnings."""
    Policy.read(text)
    assert caplog.records == []


def test_the_page_has_its_policies():
    """The page shows more than a few policies, so that the test above is not empty."""
    assert len(BLOCKS) >= 10


def test_every_field_is_documented():
    """Every field of a policy and of a rule is in a table of the page."""
    rows = " ".join(line for line in PAGE.splitlines() if line.startswith("| "))
    assert [name for name in (*POLICY.specs, *RULE.specs) if f"`{name}`" not in rows] == []
