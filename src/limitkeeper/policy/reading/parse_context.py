"""Context of reading one policy: its source lines, the diagnostics found so far, and the secrets to redact from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from .diagnostics import ERROR, SEMANTIC, WARNING, Diagnostic, PolicyError
from .nodes import Node, Scalar, SourcePosition

#: Reading stops after so many diagnostics.
MAX_DIAGNOSTICS = 100
#: Characters of a limit, a key or a match; longer texts are rejected before they are parsed.
MAX_TEXT = 400


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


class ParseContext:
    """Collects diagnostics. `folder` is the base of relative file names; `imports`: import what the policy names."""

    def __init__(self, file: str = "", lines: list[str] | None = None, folder: Path | None = None, imports: bool = False) -> None:
        self.file = file
        self.lines = lines or []
        self.folder = folder or Path()
        self.imports = imports
        self.found: list[Diagnostic] = []
        self.redacted: list[SourcePosition] = []
        self.secrets: set[str] = set()
        self.files: list[Path] = []  # key files that were looked for, whether they exist or not

    @property
    def failed(self) -> bool:
        return any(one.severity == ERROR for one in self.found)

    def error(self, position: SourcePosition, message: str, suggestion: str = "", text: str = "", kind: str = SEMANTIC) -> None:
        """Adds an error. Raises TooManyErrors when there are enough."""
        self._add(ERROR, position, message, suggestion, text, kind)
        if len(self.found) >= MAX_DIAGNOSTICS:
            raise TooManyErrors

    def warning(self, position: SourcePosition, message: str, suggestion: str = "", text: str = "") -> None:
        """Adds a warning."""
        if len(self.found) < MAX_DIAGNOSTICS - 1:
            self._add(WARNING, position, message, suggestion, text, SEMANTIC)

    def parse_error(self, node: Scalar, error: ParseError) -> None:
        """Adds a parser's error at the part of the scalar that it names."""
        position, text = node.position, node.text
        if error.span is not None:
            start, length = error.span
            position, text = node.part(start, length), node.text[start : start + length]
        self.error(position, error.message, error.suggestion, text)

    def _add(self, severity: str, at: SourcePosition, message: str, suggestion: str, text: str, kind: str) -> None:
        found = Diagnostic(severity, self.file, at.line, at.column, text, message, suggestion, at.path, kind, length=at.length)
        self.found.append(found)

    def redact(self, node: Node, start: int = 0, length: int | None = None) -> None:
        """Marks a scalar, or a part of it, as secret: no excerpt and no message shows it."""
        if not isinstance(node, Scalar):
            return
        if node.position.line:
            self.redacted.append(node.position if length is None else node.part(start, length))
        secret = node.text[start:] if length is None else node.text[start : start + length]
        if len(secret) > 2:
            self.secrets.add(secret)

    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """All diagnostics without duplicates, in file order, with excerpts and without secrets."""
        found = [self._finish(one) for one in dict.fromkeys(self.found)]
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
