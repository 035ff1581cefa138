"""What is wrong with a policy: every mistake with its place, the offending text, and what to write instead.

    shop.yaml:12:5: error: no word 'kye' here; did you mean 'key'?
       12 |     kye: user
          |     ^^^

A policy from Python has no lines: its mistakes name the path (`limits[2].key`). Errors stop a policy from being made; warnings
are told and let it pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError

ERROR, WARNING = "error", "warning"
#: What is wrong: the file is no YAML; a word or a value is not of the form that stands there; or it means something wrong.
YAML, FORM, MEANING = "yaml", "form", "meaning"
#: So much of a long source line is shown.
WIDTH = 110


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One mistake. `line` and `column` count from 1 and are 0 for a policy from Python; `excerpt` is the source line."""

    severity: str
    file: str
    line: int
    column: int
    text: str
    message: str
    suggestion: str = ""
    path: str = ""
    kind: str = MEANING
    excerpt: str = ""
    length: int = 1

    @property
    def place(self) -> str:
        """Where: "shop.yaml:12:5", or the path of a policy from Python."""
        if self.line:
            return f"{self.file}:{self.line}:{self.column}"
        return self.path or self.file or "policy"

    @property
    def said(self) -> str:
        """The message with its suggestion."""
        return f"{self.message}; {self.suggestion}" if self.suggestion else self.message

    def __str__(self) -> str:
        told = f"{self.place}: {self.severity}: {self.said}"
        return f"{told}\n{shown(self)}" if self.excerpt.strip() else told

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def shown(mistake: Diagnostic) -> str:
    """The source line with a caret under the offending text; long lines are cut around it."""
    line, start = mistake.excerpt, mistake.column - 1
    if len(line) > WIDTH:
        first = max(0, min(start - 20, len(line) - WIDTH))
        line = ("…" if first else "") + line[first : first + WIDTH] + ("…" if first + WIDTH < len(line) else "")
        start -= first - (1 if first else 0)
    number = f"{mistake.line:5d}"
    caret = "^" * max(1, min(mistake.length, len(line) - start))
    return f"{number} | {line.rstrip()}\n{' ' * len(number)} | {' ' * start}{caret}"


class PolicyError(ConfigurationError):
    """A policy that can't be used. `mistakes` are all of them, in the order of the file; the text shows each with its line.
    `files` are those that were looked for on the way: what is missing may lie there later."""

    def __init__(self, mistakes: Iterable[Diagnostic], left_out: int = 0, files: tuple[Path, ...] = ()) -> None:
        self.mistakes = tuple(mistakes)
        self.left_out = left_out
        self.files = files
        super().__init__(self.mistakes, left_out, files)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(mistake for mistake in self.mistakes if mistake.severity == ERROR)

    def __str__(self) -> str:
        count = len(self.errors)
        file = next((mistake.file for mistake in self.mistakes if mistake.file), "")
        more = " or more" if self.left_out else ""
        head = f"{file or 'the policy'} has {count}{more} mistake{'' if count == 1 else 's'}"
        return "\n".join([head, *(str(mistake) for mistake in self.mistakes)])
