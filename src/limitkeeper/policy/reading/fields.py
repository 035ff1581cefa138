"""Tables of words: which words a table may hold, what stands behind each, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .diagnostics import FORM
from .nodes import Node, Scalar, SourcePosition, Table
from .parse_context import ParseContext, ParseError, did_you_mean, short
from .validators import BAD, MISFITS, Json, Validator, only_configuration


@dataclass(frozen=True)
class Word:
    """One word of a table: its shape, what it says, and whether it must be there."""

    shape: Validator
    says: str = ""
    required: bool = False


class Said:
    """What a table said: the values that could be read, and where everything stands."""

    def __init__(self, node: Table, values: dict[str, Any]) -> None:
        self.node = node
        self.values = values

    def __contains__(self, word: str) -> bool:
        return word in self.node.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def get(self, word: str, otherwise: Any = None) -> Any:
        return self.values.get(word, otherwise)

    def at(self, word: str) -> Node:
        """What stands behind a word; the table itself when the word was not said."""
        found = self.node.entries.get(word)
        return self.node if found is None else found[1]

    def word(self, word: str) -> SourcePosition:
        """Where the word itself stands."""
        found = self.node.entries.get(word)
        return self.node.place if found is None else found[0].place

    def whole(self, *words: str) -> bool:
        """Whether each of these words was left out or could be read."""
        return all(word in self.values for word in words if word in self.node.entries)


#: More words than this has no table of a policy.
MOST = 10_000


def too_many(node: Table, page: ParseContext) -> bool:
    if len(node.entries) <= MOST:
        return False
    page.wrong(node.place, "", f"this table has {len(node.entries)} words; {MOST} are the most", "", FORM)
    return True


class Fields(Validator):
    """A table of known words. `build(said, page)` makes the value; `others` is what stands behind any other word."""

    def __init__(
        self,
        what: str,
        words: dict[str, Word],
        build: Callable[[Said, ParseContext], Any],
        *,
        others: Validator | None = None,
        named: Callable[[str], Any] = str,
        one_of: tuple[str, ...] = (),
        names: str = "",
        example: str = "",
    ) -> None:
        self.what = what
        self.words = words
        self.build = build
        self.others = others
        self.named = named
        self.one_of = one_of
        self.names = names
        self.example = example

    def read(self, node: Node, page: ParseContext) -> Any:
        if not isinstance(node, Table):
            return self.refuse(node, page)
        if too_many(node, page):
            return BAD
        said = Said(node, {})
        for text, (word, item) in node.entries.items():
            value = self.value(text, word, item, page)
            if value is not BAD:
                said.values[text] = value
        self.complete(said, page)
        try:
            return self.build(said, page)
        except MISFITS as error:
            message, remedy = only_configuration(error)
            page.wrong(node.place, "", message, remedy)
            return BAD

    def value(self, text: str, word: Scalar, item: Node, page: ParseContext) -> Any:
        known = self.words.get(text)
        if known is not None:
            return known.shape.read(item, page)
        if self.others is None:
            told = did_you_mean(text, self.words)
            page.wrong(word.place, text, f"no word {short(text)!r} belongs to {self.what}", told, FORM)
            return BAD
        value = self.others.read(item, page)
        try:
            self.named(text)
        except ParseError as wrong:
            page.wrong_text(word, wrong)
            return BAD
        return value

    def complete(self, said: Said, page: ParseContext) -> None:
        """Notes words that must be there, and two that exclude each other."""
        if said.node.partial:
            return
        for word, known in self.words.items():
            if known.required and word not in said:
                like = f"write {word}: {known.shape.example}" if known.shape.example else f"write {word}: …"
                page.wrong(first_place(said.node), "", f"{self.what} has no {word!r}", like, FORM)
        there = [word for word in self.one_of if word in said]
        if self.one_of and len(there) != 1:
            place = said.word(there[1]) if there else first_place(said.node)
            told = (
                f"{' and '.join(map(repr, there))} stand together in {self.what}"
                if there
                else f"{self.what} says nothing of what it is"
            )
            page.wrong(place, there[1] if there else "", told, f"write one of {', '.join(self.one_of)}", FORM)

    def schema(self) -> Json:
        said: Json = {
            "type": "object",
            "properties": {
                word: known.shape.schema() | ({"description": known.says} if known.says else {})
                for word, known in self.words.items()
            },
            "additionalProperties": False if self.others is None else self.others.schema(),
            "maxProperties": MOST,
        }
        required = [word for word, known in self.words.items() if known.required]
        if required:
            said["required"] = required
        if self.one_of:
            said["oneOf"] = [{"required": [word]} for word in self.one_of]
        return said


def first_place(node: Table) -> SourcePosition:
    """Where a table begins: its first word, when it has one."""
    for word, _ in node.entries.values():
        return word.place if word.place.line else node.place
    return node.place


class Pairs(Validator):
    """A table whose words are anybody's: pairs of a name and a value, in order."""

    def __init__(self, what: str, item: Validator, named: Callable[[str], Any] = str, example: str = "", least: int = 1) -> None:
        self.what = what
        self.item = item
        self.named = named
        self.example = example
        self.least = least

    def read(self, node: Node, page: ParseContext) -> Any:
        if not isinstance(node, Table):
            return self.refuse(node, page)
        if len(node.entries) < self.least:
            page.wrong(node.place, "{}", f"an empty table stands here, not {self.what}", self.remedy(), FORM)
            return BAD
        if too_many(node, page):
            return BAD
        pairs = []
        for text, (word, item) in node.entries.items():
            try:
                name = self.named(text)
            except ParseError as wrong:
                page.wrong_text(word, wrong)
                name = BAD
            pairs.append((name, self.item.read(item, page)))
        return BAD if any(name is BAD or value is BAD for name, value in pairs) else tuple(pairs)

    def schema(self) -> Json:
        return {"type": "object", "additionalProperties": self.item.schema(), "minProperties": self.least, "maxProperties": MOST}
