"""Views that have one name and are not the same: several that one function made, or of one class with other words each.

    def listing(model):                                     path("users", limit("5/s")(ListView.as_view(model=User)))
        @limits.limit("5/s")                                path("orders", limit("5/s")(ListView.as_view(model=Order)))
        def view(): ...

A limit's state goes by its name, so such views would share what each of them was given. They are told apart by where they stand:
Flask's endpoint, Django's pattern. That is the same in every process, which the order in which they are made or asked is not.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from .routes import Key, Route, bound_to, fitting

#: Letters that no rule's name has.
NEVER = frozenset('"\\')


class Places:
    """One limit as it was said, for every place where its view stands."""

    __slots__ = ("_apart", "_at", "_said", "whole")

    def __init__(self, name: str, limit: Any, key: Key, words: dict[str, Any], apart: bool = False) -> None:
        self.whole = Route(name, limit, key, words)
        self._said = (limit, key, words)
        self._apart = apart
        self._at: dict[str, Route] = {}

    def at(self, place: str | None) -> Route:
        """The limit at a place; everywhere the same one where the view's name says enough."""
        if not self._apart or place is None:
            return self.whole
        route = self._at.get(place)
        if route is None:
            route = self._at.setdefault(place, Route(fitting(f"{self.whole.name}@{spelt(place)}"), *self._said))
        return route


def spelt(place: str) -> str:
    """A place as part of a name, which goes into header fields; of what can't go there a hash tells it from others."""
    kept = "".join(letter for letter in place if " " <= letter <= "~" and letter not in NEVER)
    return kept if kept == place else f"{kept}-{sha256(place.encode('utf-8', 'replace')).hexdigest()[:8]}"


def has_siblings(view: Any) -> bool:
    """Whether other views may have this one's name: it was made within a function, or of a class with words of its own."""
    if bound_to(view) is not None:
        return False
    if getattr(view, "view_class", None) is not None:
        return bool(getattr(view, "view_initkwargs", True))  # Flask does not tell with which words
    return "<locals>" in getattr(view, "__qualname__", "")
