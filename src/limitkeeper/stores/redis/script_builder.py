"""The script of a call, put together from the rules and verbs that its asks use, and nothing else.

Redis keeps the compiled script, but every run makes its local functions anew: each costs the server some 50 ns, so what is
not asked for is not sent. Hits alone take a straight way of their own (`hit.lua`); anything else stands on `frame.lua`.

Source files are Lua as it is, but for a few lines that depend on the call: `--@time` and `--@now` (the server's time, or
times that come with each ask from a clock of one's own), `--@ttl`, and `--@decide` (which rule, where there are several).
A rule's file has sections, each under a line `---- name`.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from .codec import RULES

#: Verbs of the long way: the first byte of an ask -> the function that reads it.
VERBS: dict[str, tuple[int, str]] = {
    "decide": (16, "decide_ask"),
    "give_back": (17, "give_back_ask"),
    "register": (18, "register_ask"),
    "load": (19, "load_ask"),
    "rebook": (20, "rebook_ask"),
}
#: Rules that the straight way can take.
FILES: dict[str, int] = {rule.file: rule.code for rule in RULES.values()}

_SERVER = {
    "time": "local time = call('TIME')\nnow_us = time[1] * 1000000 + time[2]",
    "now": "",
    "ttl": "local ttl = (reset - reset % 1000) / 1000 + 1001",
}
_OWN = {"time": "", "now": "now_us, at = unpack('<d', body, at)", "ttl": "local ttl = 3600000"}


class Script(NamedTuple):
    """Source, and the name under which the server keeps it."""

    source: bytes
    sha: bytes


@cache
def script_of(parts: frozenset[str]) -> Script:
    """The script that holds these parts: files of rules, `hit`, verbs, and `clock` for times that come with the asks."""
    rules = sorted(parts & FILES.keys(), key=FILES.__getitem__)
    lines = _OWN if "clock" in parts else _SERVER
    verbs = [verb for verb in VERBS if verb in parts]
    source = _long(rules, verbs, "hit" in parts, lines) if verbs else _straight(rules, lines)
    data = source.encode()
    return Script(data, hashlib.sha1(data).hexdigest().encode())


def _straight(rules: list[str], lines: dict[str, str]) -> str:
    """Hits only."""
    parts = [sections(rule)["decide"] for rule in rules]
    choice = ""
    if len(rules) == 1:
        parts.append(f"local decide = {rules[0]}")
    else:
        parts.append("local rules = {" + ", ".join(f"[{FILES[rule]}] = {rule}" for rule in rules) + "}")
        choice = "local decide = rules[rule]"
    return "\n".join([*parts, _filled("hit", {**lines, "decide": choice})])


def _long(rules: list[str], verbs: list[str], hits: bool, lines: dict[str, str]) -> str:
    """Any verbs, any number of limits, and what those stand on in turn."""
    needed = {"decide"} if hits else set()
    needed |= {"decide", "give_back"} if "rebook" in verbs else set()
    verbs = [verb for verb in VERBS if verb in needed or verb in verbs]
    parts = []
    for rule in rules:
        found = sections(rule)
        names = ["decide", "redate", *(["give_back"] if "give_back" in verbs else [])]
        parts += [found[name] for name in ("logs", *names) if name in found]
    parts.append("local rules = {" + ", ".join(_entry(rule, "give_back" in verbs) for rule in rules) + "}")
    parts += [_filled(name, lines) for name in ("frame", *verbs, *(["hits"] if hits else []))]
    table = [f"[{VERBS[verb][0]}] = {VERBS[verb][1]}" for verb in verbs]
    if hits:
        table += [f"[{FILES[rule]}] = hit_ask" for rule in rules]
    parts.append("local verbs = {" + ", ".join(table) + "}")
    return "\n".join([*parts, _filled("loop", lines)])


def _entry(rule: str, gives: bool) -> str:
    fields = [f"decide = {rule}", f"redate = {rule}_redate", *([f"give_back = {rule}_back"] if gives else [])]
    return f"[{FILES[rule]}] = {{{', '.join([*fields, sections(rule)['traits']])}}}"


@cache
def sections(name: str) -> dict[str, str]:
    """The sections of a file, without its comments."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in _source(name):
        if line.startswith("---- "):
            current = found.setdefault(line[5:].strip(), [])
        elif line and not line.startswith("--"):
            current.append(line)
    return {section: "\n".join(text) for section, text in found.items()}


def _filled(name: str, lines: dict[str, str]) -> str:
    """A file with its marked lines replaced, without its comments."""
    out = []
    for line in _source(name):
        text = line.strip()
        if text.startswith("--@"):
            out.append(lines.get(text[3:], ""))
        elif text and not text.startswith("--"):
            out.append(line)
    return "\n".join(line for line in out if line)


@cache
def _source(name: str) -> list[str]:
    return files(__package__).joinpath("lua").joinpath(name + ".lua").read_text("utf-8").splitlines()
