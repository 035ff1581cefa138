"""Assembles the Lua script of a call from the rules and operations that its requests use.

Redis caches the compiled script, but every run creates its local functions again, about 50 ns of server time each; so a script
holds only what its requests need. Calls that consist of hits alone have scripts of their own (`hit.lua`, `hit_all.lua`); any
other mix of operations is built on `frame.lua`. The source files are plain Lua with a few marked lines that depend on the call:
`--@time` and `--@now` (the server's time, or the time that each request carries), `--@ttl`, and `--@decide` (selects the rule
where there are several). The file of a rule has sections, each under a line `---- name`.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from .limit_and_state_codec import RULES

#: Operation -> the first byte of its requests. A plain hit starts with the number of its rule instead.
OPERATIONS = {"decide": 16, "give_back": 17, "register": 18, "load": 19, "rebook": 20, "hit_all": 21, "reset": 22}
#: File of a rule -> its number.
FILES: dict[str, int] = {rule.file: rule.code for rule in RULES.values()}
#: Operation -> the operations whose functions it calls.
_NEEDS = {"rebook": {"decide", "give_back"}, "hit_all": {"decide"}, "hit": {"decide"}}

#: All source files, by their names: when a script is first needed, the process may have no descriptor left to read one.
_SOURCES = {
    path.name.removesuffix(".lua"): path.read_text("utf-8").splitlines()
    for path in files(__package__).joinpath("lua").iterdir()
    if path.name.endswith(".lua")
}

_SERVER_TIME = {
    "time": "local time = call('TIME')\nnow_us = time[1] * 1000000 + time[2]",
    "now": "",
    "ttl": "local ttl = reset > 9e15 and 9e12 or (reset - reset % 1000) / 1000 + 1001",  # above 2^53 it would be no integer
}
_REQUEST_TIME = {"time": "", "now": "now_us, at = unpack('<d', body, at)", "ttl": "local ttl = 3600000"}


class Script(NamedTuple):
    """A script and its SHA-1, by which EVALSHA calls it."""

    source: bytes
    sha: bytes


@cache
def script_of(parts: frozenset[str]) -> Script:
    """The script with these parts: files of rules, operations, `hit`, `rates` where keys may have several rates, and `clock` when
    requests carry the time."""
    rules = sorted(parts & FILES.keys(), key=FILES.__getitem__)
    lines = _REQUEST_TIME if "clock" in parts else _SERVER_TIME
    operations = parts & (OPERATIONS.keys() | {"hit"})
    if operations <= {"hit"} or operations == {"hit_all"}:
        source = _hits_only(rules, next(iter(operations), "hit"), lines)
    else:
        source = _any_operations(rules, operations, lines, "rates" in parts)
    data = source.encode()
    return Script(data, sha_of(data))


@cache
def sha_of(source: bytes) -> bytes:
    """The SHA-1 of a script, by which EVALSHA calls it."""
    return hashlib.sha1(source).hexdigest().encode()


def _hits_only(rules: list[str], file: str, lines: dict[str, str]) -> str:
    parts = [sections(rule)["decide"] for rule in rules]
    choice = ""
    if len(rules) == 1:
        parts.append(f"local decide = {rules[0]}")
    else:
        parts.append("local rules = {" + ", ".join(f"[{FILES[rule]}] = {rule}" for rule in rules) + "}")
        choice = "local decide = rules[rule]"
    return "\n".join([*parts, _filled(file, {**lines, "decide": choice})])


def _any_operations(rules: list[str], operations: frozenset[str], lines: dict[str, str], several: bool) -> str:
    needed = operations.union(*[_NEEDS.get(operation, ()) for operation in operations])
    hits = bool(needed & {"hit", "hit_all"})
    more = [name for name, needs in (("give_back", several or "give_back" in needed), ("used", several)) if needs]
    parts, tables = list[str](), list[str]()
    for rule in rules:
        found = sections(rule)
        here = [name for name in more if name in found]
        parts += [found[name] for name in ("logs", "decide", "redate", *here) if name in found]
        fields = [f"decide = {rule}", f"redate = {rule}_redate", *[f"{name} = {rule}_{name}" for name in here]]
        tables.append(f"[{FILES[rule]}] = {{{', '.join([*fields, found['traits']])}}}")
    parts.append("local rules = {" + ", ".join(tables) + "}")
    included = [name for name in OPERATIONS if name in needed and name != "hit_all"]
    files = ("frame", *(["rates"] if several else []), *included, *(["batched_hits"] if hits else []))
    parts += [_filled(name, lines) for name in files]
    table = [f"[{OPERATIONS[name]}] = {name}_request" for name in included]
    if hits:
        table += [f"[{OPERATIONS['hit_all']}] = hit_all_request", *[f"[{FILES[rule]}] = hit_request" for rule in rules]]
    parts.append("local operations = {" + ", ".join(table) + "}")
    return "\n".join([*parts, _filled("loop", lines)])


@cache
def sections(name: str) -> dict[str, str]:
    """The sections of a rule's file, without comments."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in _SOURCES[name]:
        if line.startswith("---- "):
            current = found.setdefault(line[5:].strip(), [])
        elif line and not line.startswith("--"):
            current.append(line)
    return {section: "\n".join(text) for section, text in found.items()}


def _filled(name: str, lines: dict[str, str]) -> str:
    """A file with its marked lines replaced, without comments."""
    marked = {f"--@{name}": line for name, line in lines.items()}
    filled = [marked.get(line.strip(), line) for line in _SOURCES[name]]
    return "\n".join(line for line in filled if line.strip() and not line.lstrip().startswith("--"))
