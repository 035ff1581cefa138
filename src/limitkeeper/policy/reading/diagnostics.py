"""Diagnostics of a policy: errors, warnings and notes with position, offending text and suggestion; `ParseContext` collects
them while one policy is read, and `PolicyError` carries them to the caller.

    shop.yaml:12:5: error: unknown field 'kye' in rule; did you mean 'key'?
       12 |     kye: user
          |     ^^^

A policy from Python has no lines: its diagnostics name the path (`limits[2].key`). Errors reject a policy; warnings are logged;
notes name a consequence that may be intended, and only `policy check` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Final

from ...errors import ConfigurationError
from .nodes import Scalar, SourcePosition

ERROR, WARNING, NOTE = "error", "warning", "note"
#: `Diagnostic.kind`: not valid YAML; not the type, field or range that the schema allows; valid by the schema and still wrong.
SYNTAX, SCHEMA, SEMANTIC = "syntax", "schema", "semantic"
#: Characters shown of a long source line.
WIDTH = 110
#: Reading stops after so many diagnostics.
MAX_DIAGNOSTICS = 100
#: Characters of a limit, a key or a match; longer texts are rejected before they are parsed.
MAX_TEXT = 400


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


class Invalid(Enum):
    """The type of INVALID, which stands for a value whose error has been added to the context."""

    INVALID = "invalid"


INVALID: Final = Invalid.INVALID


class ParseError(Exception):
    """A text that can't be parsed: the reason, what to write instead, and which part of it is wrong: `span` (start, length)."""

    def __init__(self, message: str, suggestion: str = "", span: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.message, self.suggestion, self.span = message, suggestion, span


def bounded_text(text: str) -> str:
    """The text itself; ParseError when it is longer than MAX_TEXT."""
    if len(text) > MAX_TEXT:
        raise ParseError(f"{shorten(text)!r} has {len(text)} characters; at most {MAX_TEXT} are allowed")
    return text


class TooManyErrors(Exception):
    """MAX_DIAGNOSTICS was reached."""


@dataclass(eq=False)
class ParseContext:
    """Collects diagnostics. `folder` is the base of relative file names; `imports`: import what the policy names. Without
    `keys_needed`, a missing key of tokens is a warning: it is often only where the application runs."""

    file: str = ""
    lines: list[str] = field(default_factory=list)
    folder: Path = field(default_factory=Path)
    imports: bool = False
    keys_needed: bool = True
    found: list[Diagnostic] = field(default_factory=list)
    redacted: list[SourcePosition] = field(default_factory=list)
    secrets: set[str] = field(default_factory=set)
    files: list[Path] = field(default_factory=list)  # key files that were looked for, whether they exist or not

    @property
    def failed(self) -> bool:
        return any(one.severity == ERROR for one in self.found)

    def error(self, at: SourcePosition, message: str, suggestion: str = "", text: str = "", kind: str = SEMANTIC) -> Invalid:
        """Adds an error; the result is INVALID. Raises TooManyErrors when there are enough."""
        self._add(ERROR, at, message, suggestion, text, kind)
        if len(self.found) >= MAX_DIAGNOSTICS:
            raise TooManyErrors
        return INVALID

    def warning(self, at: SourcePosition, message: str, suggestion: str = "", text: str = "", severity: str = WARNING) -> None:
        """Adds a warning, or a note."""
        if len(self.found) < MAX_DIAGNOSTICS - 1:
            self._add(severity, at, message, suggestion, text, SEMANTIC)

    def parse_error(self, node: Scalar, error: ParseError, kind: str = SEMANTIC) -> Invalid:
        """Adds a parser's error at the part of the scalar that it names."""
        if error.span is None:
            return self.error(node.position, error.message, error.suggestion, node.text, kind)
        start, length = error.span
        return self.error(node.part(start, length), error.message, error.suggestion, node.text[start : start + length], kind)

    def _add(self, severity: str, at: SourcePosition, message: str, suggestion: str, text: str, kind: str) -> None:
        found = Diagnostic(severity, self.file, at.line, at.column, text, message, suggestion, at.path, kind, length=at.length)
        self.found.append(found)

    def redact(self, position: SourcePosition, secret: str) -> None:
        """Marks a text at a position as secret: no excerpt and no message shows it."""
        if position.line:
            self.redacted.append(position)
        if len(secret) > 2:
            self.secrets.add(secret)

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All diagnostics without duplicates, in file order, with excerpts and without secrets. Notes are left out while there
        are errors: a rule whose match is wrong seems to apply to every request."""
        failed = self.failed
        found = [self._finish(one) for one in dict.fromkeys(self.found) if one.severity != NOTE or not failed]
        return tuple(sorted(found, key=lambda one: (one.line, one.column)))

    def policy_error(self) -> PolicyError:
        return PolicyError(self.diagnostics(), len(self.found) >= MAX_DIAGNOSTICS, tuple(self.files))

    def _finish(self, one: Diagnostic) -> Diagnostic:
        text, message, suggestion = one.text, one.message, one.suggestion
        for secret in self.secrets:
            text, message, suggestion = (part.replace(secret, "…") for part in (text, message, suggestion))
        return replace(one, text=shorten(text), message=message, suggestion=suggestion, excerpt=self._excerpt(one.line))

    def _excerpt(self, line: int) -> str:
        if not 1 <= line <= len(self.lines):
            return ""
        text = self.lines[line - 1]
        for position in self.redacted:
            if position.line == line:
                start, end = position.column - 1, position.column - 1 + position.length
                text = text[:start] + "·" * len(text[start:end]) + text[end:]
        return "".join(one if one.isprintable() else " " if one == "\t" else "�" for one in text)


def shorten(text: str, length: int = 60) -> str:
    """A text for a message: on one line, at most `length` characters."""
    line = " ".join(text.split()) if "\n" in text else text
    return line if len(line) <= length else f"{line[: length - 1]}…"


def nearest(word: str, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """The known word that is most similar, ignoring case; None where none is similar enough."""
    words = list(known)
    if not word or len(word) > 40 or len(words) > 1000:
        return None
    folded = {one.casefold(): one for one in words}
    found = get_close_matches(word.casefold(), list(folded), 1, similarity)
    return folded[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The suggestion for an unknown word: the nearest known one, `otherwise`, or the list of all."""
    words = list(known)
    found = nearest(word, words)
    if found is not None:
        return f"did you mean {found!r}?"
    return otherwise or (f"write one of {', '.join(words)}" if len(words) <= 20 else "")


def split_remedy(error: Exception | str) -> tuple[str, str]:
    """Splits "message; remedy"."""
    message, _, remedy = str(error).rpartition("; ")
    return (message, remedy) if message else (remedy, "")
