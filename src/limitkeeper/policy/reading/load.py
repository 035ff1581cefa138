"""Loads policies from files, text and Python values. All errors are found in one pass; warnings are logged once."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ...errors import ConfigurationError
from ..model import Policy
from .assembly import Assembly
from .diagnostics import INVALID, SYNTAX, WARNING, Invalid, ParseContext, TooManyErrors
from .nodes import Node, SourceError, from_python
from .policy_sections import POLICY
from .semantic_checks import SemanticChecks
from .validators import Validator
from .yaml import MAX_BYTES, decode_text, parse_yaml

log = logging.getLogger("limitkeeper")
T = TypeVar("T")
#: The bytes of a file, YAML text, or Python values.
Source = bytes | str | Mapping[str, object]


def load(path: str | Path, keys_needed: bool = True) -> Policy:
    """Reads a policy file. Raises PolicyError with all errors. `keys_needed`: see `examine`."""
    return _finish(*examine(path, keys_needed=keys_needed))


def read(text: str, folder: Path | None = None) -> Policy:
    """Reads the text of a policy file; relative file names start at `folder`, or at the working directory."""
    if not isinstance(text, str):
        raise ConfigurationError(f"expected the text of a policy, got {text!r:.60}; Policy.load(path) reads a file")
    context = ParseContext("<text>", text.splitlines(), folder or Path())
    return _finish(_assemble(text, context, None), context)


def from_fields(fields: Mapping[str, object], warn: bool = True) -> Policy:
    """Reads a policy that is written in Python."""
    context = ParseContext()
    return _finish(_assemble(fields, context, None), context, warn)


def examine(path: str | Path, imports: bool = False, keys_needed: bool = True) -> tuple[Policy | None, ParseContext]:
    """A file's policy (None: it has errors) and the context with all diagnostics. Raises ConfigurationError only for a file that
    can't be read. Without `keys_needed`, a policy whose keys are missing identifies no token."""
    data, context = open_source(path)
    context.imports, context.keys_needed = imports, keys_needed
    return _assemble(data, context, Path(path)), context


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


def parse_tree(source: Source, context: ParseContext) -> Node | None:
    """The tree of a source; None after adding its errors, if it has none."""
    tree, errors = None, list[SourceError]()
    try:
        if isinstance(source, Mapping):
            tree = from_python(source)
        else:
            tree, errors = parse_yaml(decode_text(source) if isinstance(source, bytes) else source)
    except SourceError as error:
        errors = [error]
    for one in errors:
        context.error(one.position, one.message, one.suggestion, one.text, SYNTAX)
    return tree


def parse_source(source: Source, validator: Validator[T], context: ParseContext) -> T | Invalid:
    """What a validator reads from a source; INVALID after adding its errors."""
    try:
        tree = parse_tree(source, context)
        return INVALID if tree is None else validator.parse(tree, context)
    except TooManyErrors:
        return INVALID


def read_source(source: Source, validator: Validator[T], context: ParseContext) -> T:
    """As `parse_source`; PolicyError with all errors."""
    found = parse_source(source, validator, context)
    if found is INVALID or context.failed:
        raise context.policy_error()
    return found


def _assemble(source: Source, context: ParseContext, path: Path | None) -> Policy | None:
    """The policy of a source; None: it has errors."""
    fields = parse_source(source, POLICY, context)
    if fields is INVALID:
        return None
    try:
        assembly = Assembly(fields, context, path)
        SemanticChecks(assembly).run()
    except TooManyErrors:
        return None
    if context.failed or isinstance(source, Mapping):
        return None if context.failed else assembly.policy
    data = source if isinstance(source, bytes) else source.encode("utf-8", "surrogatepass")
    return replace(assembly.policy, version=version_of(data))


def version_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def has_changed(policy: Policy) -> bool:
    """Whether the file that a policy was read from has another text now."""
    try:
        return policy.source is not None and version_of(open_source(policy.source)[0]) != policy.version
    except ConfigurationError:  # it can't be read now
        return False


def _finish(policy: Policy | None, context: ParseContext, warn: bool = True) -> Policy:
    if policy is None:
        raise context.policy_error()
    for one in context.diagnostics():
        if warn and one.severity == WARNING:
            log.warning("%s: %s", one.location, one.full_message)
    return policy
