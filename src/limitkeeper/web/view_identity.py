"""Views that have one name and are not the same: several that one function made, or of one class with other words each.

    def listing(model):                                     path("users", limit("5/s")(ListView.as_view(model=User)))
        @limits.limit("5/s")                                path("orders", limit("5/s")(ListView.as_view(model=Order)))
        def view(): ...

A limit's state goes by its name, so such views would share what each of them was given. They are told apart by where they stand:
Flask's endpoint, Django's pattern. That is the same in every process, which the order in which they are made or asked is not.
"""

from __future__ import annotations

from typing import Any

from .view_limit import Key, ViewLimit, bound_to, fitting


class Places:
    """One limit as it was said, for every place where its view stands."""

    __slots__ = ("_apart", "_at", "_said", "whole")

    def __init__(self, name: str, limit: Any, key: Key, words: dict[str, Any], apart: bool = False) -> None:
        self.whole = ViewLimit(name, limit, key, words)
        self._said = (limit, key, words)
        self._apart = apart
        self._at: dict[str, ViewLimit] = {}

    def at(self, place: str | None) -> ViewLimit:
        """The limit at a place; everywhere the same one where the view's name says enough."""
        if not self._apart or place is None:
            return self.whole
        route = self._at.get(place)
        if route is None:
            route = self._at.setdefault(place, ViewLimit(placed(self.whole.name, place), *self._said))
        return route


def placed(name: str, place: str) -> str:
    """A name for what stands at one of several places."""
    return fitting(f"{name}@{place}")


def has_siblings(view: Any) -> bool:
    """Whether other views may have this one's name: it was made within a function, or of a class with words of its own."""
    if bound_to(view) is not None:
        return False
    if getattr(view, "view_class", None) is not None:
        return bool(getattr(view, "view_initkwargs", True))  # Flask does not tell with which words
    return "<locals>" in getattr(view, "__qualname__", "")


def place_of(scope: Any) -> str | None:
    """Where the endpoint of a request stands, in Starlette and its kin: `POST /orders/{order}`; clients choose the path."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    if path is None:
        return None
    return " ".join([*sorted(getattr(route, "methods", None) or ()), path])
