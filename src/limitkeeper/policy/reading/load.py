"""Policies from files, from text and from Python. All mistakes are found at once; warnings are logged once and let it pass."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ..model import Policy
from .assembly import Assembly
from .diagnostics import YAML
from .nodes import Node, TooDeep, from_python
from .parse_context import ParseContext, TooManyErrors
from .sections import POLICY
from .semantic_checks import check
from .validators import BAD
from .yaml import LARGEST, NotYaml, text_of, tree_of

log = logging.getLogger("limitkeeper")


def load(path: str | Path) -> Policy:
    """Reads a policy file. Raises `PolicyError` with every mistake."""
    return _told(*examined(path))


def read(text: str) -> Policy:
    """Reads the text of a policy file; files that it names are looked for in the working folder."""
    if not isinstance(text, str):
        raise ConfigurationError(f"a policy is read from text, not from {text!r:.60}; Policy.load(path) reads a file")
    page = ParseContext("<text>", text.splitlines())
    return _told(_of_text(text, page, None), page)


def of(said: Mapping[str, Any]) -> Policy:
    """Reads a policy that was said in Python."""
    page = ParseContext()
    try:
        tree = from_python(said)
    except TooDeep as error:
        page.wrong(error.place, "", str(error))
        raise page.error() from None
    return _told(_assembled(tree, page, None), page)


def examined(path: str | Path, imports: bool = False) -> tuple[Policy | None, ParseContext]:
    """A file's policy (None: it has errors) and the page with all mistakes; nothing is raised but ConfigurationError for an
    unreadable file."""
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ConfigurationError(f"a policy is loaded from the path of its file, not from {path!r:.60}")
    place = Path(path)
    try:
        with place.open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{path}: the policy can't be read: {reason.lower()}") from None
    page = ParseContext(str(path), data.decode("utf-8-sig", "replace").splitlines(), place.parent, imports)
    try:
        text = text_of(data)
    except NotYaml as error:
        _note(error, page)
        return None, page
    return _of_text(text, page, place), page


def _of_text(text: str, page: ParseContext, source: Path | None) -> Policy | None:
    try:
        tree, refused = tree_of(text)
        for error in refused:
            _note(error, page)
    except NotYaml as error:
        _note(error, page)
        return None
    except TooManyErrors:
        return None
    return _assembled(tree, page, source)


def _note(error: NotYaml, page: ParseContext) -> None:
    page.wrong(error.place, error.text, error.message, error.suggestion, YAML)


def _assembled(tree: Node, page: ParseContext, source: Path | None) -> Policy | None:
    try:
        loaded = POLICY.read(tree, page)
        if loaded is BAD:
            return None
        assembly = Assembly(loaded, page, source)
        check(assembly)
    except TooManyErrors:
        return None
    return None if page.failed else assembly.policy


def _told(policy: Policy | None, page: ParseContext) -> Policy:
    if policy is None:
        raise page.error()
    for mistake in page.mistakes():
        log.warning("%s: %s", mistake.place, mistake.said)
    return policy
