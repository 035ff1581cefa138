"""Things of the application that a policy names: `package.module:attribute`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...errors import ConfigurationError


def resolved(text: str) -> Any:
    """What the text names, imported now."""
    module, colon, path = text.partition(":")
    if not colon or not module or not path:
        raise ConfigurationError(f"{text!r} names nothing; write package.module:attribute")
    try:
        found: Any = import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{text!r}: the module {module!r} can't be imported here ({error})") from error
    except Exception as error:  # whatever a module does while it is imported
        told = f"{text!r}: importing the module {module!r} raised {type(error).__name__} ({error})"
        raise ConfigurationError(f"{told}; it must be importable on its own") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigurationError(f"{text!r}: {module!r} has no {name!r}") from None
    return found
