"""A policy while it is read: where it comes from, what was found wrong so far, and what must not be shown."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from .diagnostics import ERROR, MEANING, WARNING, Diagnostic, PolicyError
from .nodes import Node, Scalar, SourcePosition

#: After so many mistakes reading ends: nobody reads more of them at once.
ENOUGH = 100


class ParseError(Exception):
    """A text that can't be read: why, what to write, and which part of it (start, length)."""

    def __init__(self, message: str, suggestion: str = "", part: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.suggestion = suggestion
        self.part = part


#: Longer texts are no limits, keys or matches.
LONGEST = 400


def bounded(text: str) -> str:
    """A text that is not longer than anything that makes sense."""
    if len(text) > LONGEST:
        raise ParseError(f"{short(text)!r} has {len(text)} characters; nothing here is that long")
    return text


class TooManyErrors(Exception):
    """There are more mistakes than anybody wants to read."""


class ParseContext:
    """Collects mistakes. `folder` is where files that the policy names are looked for."""

    def __init__(self, file: str = "", lines: list[str] | None = None, folder: Path | None = None, imports: bool = False) -> None:
        self.file = file
        self.lines = lines or []
        self.folder = folder or Path()
        self.imports = imports
        self.notes: list[tuple[str, SourcePosition, str, str, str, str]] = []
        self.hidden: list[SourcePosition] = []
        self.secrets: set[str] = set()
        self.files: list[Path] = []  # that were looked for, found or not

    @property
    def failed(self) -> bool:
        return any(note[0] == ERROR for note in self.notes)

    def wrong(self, place: SourcePosition, text: str, message: str, suggestion: str = "", kind: str = MEANING) -> None:
        """Notes an error at a place."""
        self.notes.append((ERROR, place, text, message, suggestion, kind))
        if len(self.notes) >= ENOUGH:
            raise TooManyErrors

    def warn(self, place: SourcePosition, text: str, message: str, suggestion: str = "") -> None:
        """Notes a warning at a place."""
        if len(self.notes) < ENOUGH - 1:
            self.notes.append((WARNING, place, text, message, suggestion, MEANING))

    def wrong_text(self, node: Scalar, wrong: ParseError, kind: str = MEANING) -> None:
        """Notes that a text could not be read."""
        place, text = node.place, node.text
        if wrong.part is not None:
            start, length = wrong.part
            place, text = node.within(start, length), node.text[start : start + length]
        self.wrong(place, text, wrong.message, wrong.suggestion, kind)

    def hide(self, node: Node, start: int = 0, length: int | None = None) -> None:
        """A secret: its part of the source is never shown, nor is it repeated in a message."""
        if not isinstance(node, Scalar):
            return
        if node.place.line:
            self.hidden.append(node.place if length is None else node.within(start, length))
        secret = node.text[start:] if length is None else node.text[start : start + length]
        if len(secret) > 2:
            self.secrets.add(secret)

    def mistakes(self) -> tuple[Diagnostic, ...]:
        """All of them, in the order of the file."""
        found = [self._mistake(*note) for note in dict.fromkeys(self.notes)]
        return tuple(sorted(found, key=lambda mistake: (mistake.line, mistake.column)))

    def error(self) -> PolicyError:
        return PolicyError(self.mistakes(), int(len(self.notes) >= ENOUGH), tuple(self.files))

    def _mistake(self, severity: str, place: SourcePosition, text: str, message: str, suggestion: str, kind: str) -> Diagnostic:
        excerpt = self._excerpt(place.line)
        for secret in self.secrets:
            text, message, suggestion = (said.replace(secret, "…") for said in (text, message, suggestion))
        return Diagnostic(
            severity,
            self.file,
            place.line,
            place.column,
            short(text),
            message,
            suggestion,
            place.path,
            kind,
            excerpt,
            place.length,
        )

    def _excerpt(self, line: int) -> str:
        if not 1 <= line <= len(self.lines):
            return ""
        text = self.lines[line - 1]
        for place in self.hidden:
            if place.line == line:
                start = place.column - 1
                text = text[:start] + "·" * len(text[start : start + place.length]) + text[start + place.length :]
        return "".join(one if one.isprintable() else " " if one == "\t" else "�" for one in text)


def short(text: str, most: int = 60) -> str:
    """A text for a message: one line, not too long."""
    line = " ".join(text.split()) if "\n" in text else text
    return line if len(line) <= most else f"{line[: most - 1]}…"


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """What somebody may have meant."""
    words = list(known)
    if not word or len(word) > 40 or len(words) > 1000:
        return None
    folded = {one.casefold(): one for one in words}
    found = get_close_matches(word.casefold(), list(folded), 1, likeness)
    return folded[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The suggestion for a word that nobody knows."""
    words = list(known)
    meant = nearest(word, words)
    if meant is not None:
        return f"did you mean {meant!r}?"
    return otherwise or (f"write one of {', '.join(words)}" if len(words) <= 20 else "")
