"""The types of the public API: mypy reads a file that uses all of it."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import limitkeeper

ROOT = Path(__file__).parents[2]
API = ROOT / "tests" / "typing" / "api.py"


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed: pip install '.[lint]'")
def test_the_public_api_has_the_types_that_users_expect():
    """`mypy --strict` finds nothing wrong in tests/typing/api.py, where every type is asserted."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", str(API.relative_to(ROOT))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_typed_file_uses_every_public_name():
    """tests/typing/api.py mentions every name of `limitkeeper.__all__`."""
    names = {node.id for node in ast.walk(ast.parse(API.read_text())) if isinstance(node, ast.Name)}
    assert sorted(set(limitkeeper.__all__) - names) == []
