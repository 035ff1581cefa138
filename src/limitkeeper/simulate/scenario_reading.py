"""Reads a scenario: a YAML file, or a mapping in Python. All mistakes are shown with file, line, column and suggestion.

The validators are those of policy files (policy/reading), so durations, limits and messages are the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..policy.reading.diagnostics import ParseContext
from ..policy.reading.load import Source, open_source, read_source
from .scenario import Scenario
from .scenario_fields import SCENARIO


def load_scenario(path: str | Path) -> Scenario:
    """Reads a file; PolicyError shows all mistakes."""
    return _read(*open_source(path, "scenario"), Path(path).stem)


def scenario_of(**fields: object) -> Scenario:
    """A scenario that is written in Python."""
    return _read(fields, ParseContext(), "scenario")


def _read(source: Source, context: ParseContext, name: str) -> Scenario:
    """Reads a scenario; `name` is for one without a name."""
    found: Scenario = read_source(source, SCENARIO, context)
    return found if found.name else replace(found, name=name)
