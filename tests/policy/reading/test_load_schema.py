"""JSON Schema and loader agree: a policy that is changed in one place is invalid for both or for neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from limitkeeper.policy.reading.diagnostics import SCHEMA, SYNTAX
from limitkeeper.policy.reading.load import examine
from limitkeeper.policy.reading.nodes import to_python
from limitkeeper.policy.reading.sections import policy_schema
from limitkeeper.policy.reading.yaml import parse_yaml

HERE = Path(__file__).parents[1]
EVERYTHING = (HERE / "everything.yaml").read_text()
VALIDATOR = jsonschema.Draft202012Validator(policy_schema())
WORDS = sorted({word for word in str(policy_schema()).replace("'", " ").split() if word.isidentifier()})
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**10),
    st.sampled_from([0.5, 1.5, -2.25]),
    st.sampled_from(
        ["ip", "user | ip", "5/s", "unlimited", "GET /x", "10.0.0.0/8", "80%", "off", "On", "true", "draft-11", "delta"]
    ),
    st.text(max_size=8),
)
TREE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(node, (dict, list)):
        for step, item in node.items() if isinstance(node, dict) else enumerate(node):
            found += places(item, (*path, step))
    return found


SAID = to_python(parse_yaml(EVERYTHING)[0])
PLACES = places(SAID)[1:]


def kinds_of(said: Any, folder: Path) -> set[str]:
    """The kinds of diagnostics that the loader gives for a file."""
    path = folder / "changed.yaml"
    path.write_text(json.dumps(said, indent=1))
    return {one.kind for one in examine(path)[1].diagnostics()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the key that the policy names."""
    made = tmp_path_factory.mktemp("schema")
    (made / "jwt.pub").write_bytes((HERE / "jwt.pub").read_bytes())
    return made


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(PLACES), value=TREE, action=st.sampled_from(["replace", "replace", "lose", "add"]))
def test_loader_and_schema_agree(folder, path, value, action):
    """A field removed, added or replaced is invalid by the schema exactly when the loader reports a schema error."""
    said = json.loads(json.dumps(SAID))
    parent = said
    for step in path[:-1]:
        parent = parent[step]
    if action == "lose":
        del parent[path[-1]]
    elif action == "add" and isinstance(parent, dict):
        parent["added"] = value
    else:
        parent[path[-1]] = value
    kinds = kinds_of(said, folder)
    if SYNTAX not in kinds:
        assert VALIDATOR.is_valid(said) == (SCHEMA not in kinds)
