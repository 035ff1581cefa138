"""Things to call that a policy file names: "package.module:attribute". Imported when a gate is made, never by reading a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...errors import ConfigurationError
from ..model import Policy
from .reference import resolved


@dataclass(frozen=True, slots=True)
class Named:
    """A callable by its name. Two of the same name are equal; calling it imports it where nobody did before."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return imported(self.name)(*args, **kwargs)

    def found(self) -> Any:
        """What it names; ConfigurationError when it can't be imported or called."""
        return imported(self.name)


@lru_cache(maxsize=1024)
def imported(name: str) -> Any:
    """What "package.module:attribute" names: something that can be called."""
    found = resolved(name)
    if not callable(found):
        raise ConfigurationError(f"{name!r}: {found!r} can't be called; name a function or a class")
    return found


def names_of(policy: Policy) -> Iterator[Named]:
    """Everything that a policy calls by a name."""
    for identity in policy.identify.values():
        yield from _named(getattr(identity, "call", None))
    for rule in policy.rules:
        overrides = getattr(rule.overrides, "call", None)
        for call in (rule.cost.call, rule.charge.call, rule.on_refusal.handler, overrides):
            yield from _named(call)


def _named(call: Any) -> Iterator[Named]:
    if isinstance(call, Named):
        yield call
    elif isinstance(call, str) and ":" in call:  # a degrade handler; without a colon it is one that the middleware is given
        yield Named(call)


def import_all(policy: Policy) -> None:
    """Imports everything that a policy names, so that what is missing is told before the first request."""
    for named in names_of(policy):
        named.found()
