"""Reads a scenario: a YAML file, or a mapping in Python. All mistakes are shown with file, line, column and suggestion.

The validators are those of policy files (policy/reading), so durations, limits and messages are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import ConfigurationError
from ..policy.reading.diagnostics import INVALID, SYNTAX, Invalid, ParseContext, TooManyErrors
from ..policy.reading.nodes import Node, SourceError, from_python
from ..policy.reading.yaml import MAX_BYTES, decode_text, parse_yaml
from .scenario import Scenario
from .scenario_fields import SCENARIO


def load_scenario(path: str | Path) -> Scenario:
    """Reads a file; PolicyError shows all mistakes."""
    file = Path(path)
    try:
        data = file.read_bytes()[: MAX_BYTES + 1]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{path}: can't read the scenario: {reason.lower()}") from None
    context = ParseContext(str(path), data.decode("utf-8-sig", "replace").splitlines(), file.parent)
    return read_tree(lambda: parse_yaml(decode_text(data)), context, file.stem)


def scenario_of(**fields: object) -> Scenario:
    """A scenario that is written in Python."""
    return read_tree(lambda: (from_python(fields), []), ParseContext(), "scenario")


def read_tree(parse: Callable[[], tuple[Node, list[SourceError]]], context: ParseContext, name: str) -> Scenario:
    """Parses and validates; `name` is for a scenario without one."""
    found: Scenario | Invalid = INVALID
    try:
        tree, errors = parse()
        for one in errors:
            context.error(one.position, one.message, one.suggestion, one.text, SYNTAX)
        found = SCENARIO.parse(tree, context)
    except SourceError as error:
        context.error(error.position, error.message, error.suggestion, error.text, SYNTAX)
    except TooManyErrors:
        pass
    if context.failed or isinstance(found, Invalid):
        raise context.policy_error()
    return found if found.name else replace(found, name=name)
