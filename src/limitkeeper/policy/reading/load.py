"""Loads policies from files, text and Python values. All errors are found in one pass; warnings are logged once."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...errors import ConfigurationError
from ..model import Policy
from .assembly import Assembly
from .diagnostics import INVALID, SYNTAX, WARNING, ParseContext, TooManyErrors
from .nodes import Node, SourceError, from_python
from .policy_schema import POLICY
from .semantic_checks import SemanticChecks
from .yaml import MAX_BYTES, decode_text, parse_yaml

log = logging.getLogger("limitkeeper")


def load(path: str | Path) -> Policy:
    """Reads a policy file. Raises PolicyError with all errors."""
    return _finish(*examine(path))


def read(text: str, folder: Path | None = None) -> Policy:
    """Reads the text of a policy file; relative file names start at `folder`, or at the working directory."""
    if not isinstance(text, str):
        raise ConfigurationError(f"expected the text of a policy, got {text!r:.60}; Policy.load(path) reads a file")
    context = ParseContext("<text>", text.splitlines(), folder or Path())
    return _finish(_from_text(text, context, None), context)


def from_fields(fields: Mapping[str, object]) -> Policy:
    """Reads a policy that is written in Python."""
    context = ParseContext()
    try:
        return _finish(_from_tree(from_python(fields), context, None), context)
    except SourceError as error:
        context.error(error.position, error.message)
        raise context.policy_error() from None


def examine(path: str | Path, imports: bool = False, keys_needed: bool = True) -> tuple[Policy | None, ParseContext]:
    """A file's policy (None: it has errors) and the context with all diagnostics. Raises ConfigurationError only for a file that
    can't be read. Without `keys_needed`, a policy whose keys are missing identifies no token."""
    data, context = open_source(path)
    context.imports, context.keys_needed = imports, keys_needed
    return _from_text(data, context, Path(path)), context


def open_source(path: str | Path, noun: str = "policy") -> tuple[bytes, ParseContext]:
    """A file's bytes and an empty context for its diagnostics. Raises ConfigurationError for a file that can't be read."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ConfigurationError(f"expected the path of a {noun} file, got {path!r:.60}")
    file = Path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{path}: can't read the {noun}: {reason.lower()}") from None
    return data, ParseContext(str(path), data.decode("utf-8-sig", "replace").splitlines(), file.parent)


def parse_tree(data: bytes | str, context: ParseContext) -> Node | None:
    """The tree of a YAML text; None after adding its syntax errors, if it has no tree or too many of them."""
    try:
        tree, errors = parse_yaml(decode_text(data) if isinstance(data, bytes) else data)
    except SourceError as error:
        tree, errors = None, [error]
    try:
        for one in errors:
            context.error(one.position, one.message, one.suggestion, one.text, SYNTAX)
    except TooManyErrors:
        return None
    return tree


def _from_text(data: bytes | str, context: ParseContext, source: Path | None) -> Policy | None:
    tree = parse_tree(data, context)
    policy = None if tree is None else _from_tree(tree, context, source)
    return None if policy is None else replace(policy, version=_version(data))


def _from_tree(tree: Node, context: ParseContext, source: Path | None) -> Policy | None:
    try:
        fields = POLICY.parse(tree, context)
        if fields is INVALID:
            return None
        assembly = Assembly(fields, context, source)
        SemanticChecks(assembly).run()
    except TooManyErrors:
        return None
    return None if context.failed else assembly.policy


def _version(data: bytes | str) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _finish(policy: Policy | None, context: ParseContext) -> Policy:
    if policy is None:
        raise context.policy_error()
    for one in context.diagnostics():
        if one.severity == WARNING:
            log.warning("%s: %s", one.location, one.full_message)
    return policy
