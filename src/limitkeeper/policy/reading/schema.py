"""The policy file as JSON Schema, for editors: made from the same shapes that read it.

# yaml-language-server: $schema=limitkeeper.schema.json
"""

from __future__ import annotations

from typing import Any

from .sections import POLICY

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """The schema of a policy file. What it accepts may still mean something wrong; `limitkeeper policy check` says."""
    return {
        "$schema": DIALECT,
        "title": "limitkeeper policy",
        "description": "Who is limited by what.",
        **POLICY.schema(),
    }
