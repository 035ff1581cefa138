"""Loads policies from files, text and Python values. All errors are found in one pass; warnings are logged once."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from ...errors import ConfigurationError
from ..model import Policy
from .assembly import Assembly
from .diagnostics import SYNTAX
from .nodes import Node, SourceError, from_python
from .parse_context import ParseContext, TooManyErrors
from .sections import POLICY
from .semantic_checks import check
from .validators import INVALID
from .yaml import MAX_BYTES, decode_text, parse_yaml

log = logging.getLogger("limitkeeper")


def load(path: str | Path) -> Policy:
    """Reads a policy file. Raises PolicyError with all errors."""
    return _finish(*examine(path))


def read(text: str) -> Policy:
    """Reads the text of a policy file; relative file names start at the working directory."""
    if not isinstance(text, str):
        raise ConfigurationError(f"expected the text of a policy, got {text!r:.60}; Policy.load(path) reads a file")
    context = ParseContext("<text>", text.splitlines())
    return _finish(_from_text(text, context, None), context)


def from_fields(fields: Mapping[str, object]) -> Policy:
    """Reads a policy that is written in Python."""
    context = ParseContext()
    try:
        tree = from_python(fields)
    except SourceError as error:
        context.error(error.position, error.message)
        raise context.policy_error() from None
    return _finish(_from_tree(tree, context, None), context)


def examine(path: str | Path, imports: bool = False) -> tuple[Policy | None, ParseContext]:
    """A file's policy (None: it has errors) and the context with all diagnostics. Raises ConfigurationError only for a file that
    can't be read."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ConfigurationError(f"expected the path of a policy file, got {path!r:.60}")
    file = Path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{path}: can't read the policy: {reason.lower()}") from None
    context = ParseContext(str(path), data.decode("utf-8-sig", "replace").splitlines(), file.parent, imports)
    return _from_text(data, context, file), context


def _from_text(data: bytes | str, context: ParseContext, source: Path | None) -> Policy | None:
    try:
        tree, errors = parse_yaml(decode_text(data) if isinstance(data, bytes) else data)
        for error in errors:
            _add_syntax_error(error, context)
    except SourceError as error:
        _add_syntax_error(error, context)
        return None
    except TooManyErrors:
        return None
    return _from_tree(tree, context, source)


def _add_syntax_error(error: SourceError, context: ParseContext) -> None:
    context.error(error.position, error.message, error.suggestion, error.text, SYNTAX)


def _from_tree(tree: Node, context: ParseContext, source: Path | None) -> Policy | None:
    try:
        fields = POLICY.parse(tree, context)
        if fields is INVALID:
            return None
        assembly = Assembly(fields, context, source)
        check(assembly)
    except TooManyErrors:
        return None
    return None if context.failed else assembly.policy


def _finish(policy: Policy | None, context: ParseContext) -> Policy:
    if policy is None:
        raise context.policy_error()
    for warning in context.diagnostics():
        log.warning("%s: %s", warning.location, warning.full_message)
    return policy
