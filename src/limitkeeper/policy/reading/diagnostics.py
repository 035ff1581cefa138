"""Diagnostics of a policy: errors and warnings with position, offending text and suggestion; `PolicyError` carries them.

    shop.yaml:12:5: error: unknown field 'kye' in rule; did you mean 'key'?
       12 |     kye: user
          |     ^^^

A policy from Python has no lines: its diagnostics name the path (`limits[2].key`). Errors reject a policy; warnings are logged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ...errors import ConfigurationError

ERROR, WARNING = "error", "warning"
#: `Diagnostic.kind`: not valid YAML; not the type, field or range that the schema allows; valid by the schema and still wrong.
SYNTAX, SCHEMA, SEMANTIC = "syntax", "schema", "semantic"
#: Characters shown of a long source line.
WIDTH = 110


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One error or warning. `line` and `column` count from 1, 0 for a policy from Python; `excerpt` is the source line."""

    severity: str
    file: str
    line: int
    column: int
    text: str
    message: str
    suggestion: str = ""
    path: str = ""
    kind: str = SEMANTIC
    excerpt: str = ""
    length: int = 1

    @property
    def location(self) -> str:
        """ "shop.yaml:12:5", or the path in a policy from Python."""
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.path or self.file or "policy"

    @property
    def full_message(self) -> str:
        """The message with its suggestion."""
        return f"{self.message}; {self.suggestion}" if self.suggestion else self.message

    def __str__(self) -> str:
        text = f"{self.location}: {self.severity}: {self.full_message}"
        return f"{text}\n{self._source_lines()}" if self.excerpt.strip() else text

    def _source_lines(self) -> str:
        """The source line with carets under the offending text; a long line is cut around it."""
        line, start = self.excerpt, self.column - 1
        if len(line) > WIDTH:
            first = max(0, min(start - 20, len(line) - WIDTH))
            line = ("…" if first else "") + line[first : first + WIDTH] + ("…" if first + WIDTH < len(line) else "")
            start -= first - (1 if first else 0)
        number = f"{self.line:5d}"
        caret = "^" * max(1, min(self.length, len(line) - start))
        return f"{number} | {line.rstrip()}\n{' ' * len(number)} | {' ' * start}{caret}"

    def as_dict(self) -> dict[str, str | int]:
        """The fields, for JSON."""
        return asdict(self)


class PolicyError(ConfigurationError):
    """A policy with errors. `diagnostics` holds all errors and warnings in file order; `str()` shows each with its source line.
    `truncated`: reading stopped before the end. `files` are the key files that were looked for, missing ones included."""

    def __init__(self, diagnostics: Iterable[Diagnostic], truncated: bool = False, files: tuple[Path, ...] = ()) -> None:
        self.diagnostics = tuple(diagnostics)
        self.truncated = truncated
        self.files = files
        super().__init__(self.diagnostics, truncated, files)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(one for one in self.diagnostics if one.severity == ERROR)

    def __str__(self) -> str:
        number = len(self.errors)
        file = next((one.file for one in self.diagnostics if one.file), "the policy")
        more = " or more" if self.truncated else ""
        return "\n".join([f"{file} has {number}{more} error{'' if number == 1 else 's'}", *map(str, self.diagnostics)])
