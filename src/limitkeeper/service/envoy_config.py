"""Domains of the Envoy rate limit service: YAML with the keys of Envoy's reference server, and `algorithm`, `burst`, any period.

A request's descriptor is a list of (key, value). Each level of `descriptors` is searched for the exact value, then for patterns
with `*` in the order of the file, then for the key without a value; a limit applies when it is found at the last entry. A file
has one domain; a folder may have several files. The default algorithm is the reference server's: fixed windows on the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..algorithms import ALGORITHMS
from ..algorithms.claim import NamedLimit
from ..algorithms.limit import Limit
from ..algorithms.limit_parser import parse_limit
from ..errors import ConfigurationError, InvalidLimit
from ..policy.reading.diagnostics import Invalid, ParseContext, ParseError, bounded_text
from ..policy.reading.load import open_source, read_source
from ..policy.reading.nodes import SourcePosition
from ..policy.reading.validators import Boolean, Choice, Field, Fields, Integer, ListOf, ParsedFields, Text
from ..rate import MAX_COUNT, duration_us

DAY = 86_400_000_000
#: Envoy's units: (number in the protocol, microseconds), as the reference server counts them.
UNITS = {"second": (1, 1_000_000), "minute": (2, 60_000_000), "hour": (3, 3_600_000_000), "day": (4, DAY)}
UNITS |= {"month": (5, 30 * DAY), "year": (6, 365 * DAY), "week": (7, 7 * DAY)}
PERIODS = dict(UNITS.values())
NUMBERS = {period: number for number, period in UNITS.values()}


@dataclass(frozen=True)
class RateLimit:
    """A `rate_limit`. `limit` is None where nothing has to be counted: unlimited, or 0 requests per unit."""

    count: int
    period: int
    limit: Limit | None = None
    name: str = ""
    unlimited: bool = False
    replaces: frozenset[str] = frozenset()


@dataclass(eq=False)
class Descriptor:
    """An item of `descriptors`. `rate` None: no limit applies here. `label`, its path, names its state in `named`."""

    key: str
    value: str
    rate: RateLimit | None
    shadow: bool
    shared: bool
    quota: bool
    children: Level
    position: SourcePosition
    label: str = ""
    named: NamedLimit | None = None


class Level:
    """The descriptors of one level, by key and value."""

    def __init__(self, items: Sequence[Descriptor], context: ParseContext) -> None:
        self.items = items
        self._known: dict[tuple[str, str], Descriptor] = {}
        self._patterns: dict[str, list[Descriptor]] = {}
        for one in items:
            first = self._known.setdefault((one.key, one.value), one)
            if first is not one:
                message = f"duplicate descriptor {one.key!r} {one.value!r}; the first one is in line {first.position.line}"
                context.error(one.position, message, "remove one of them")
            if "*" in one.value:
                self._patterns.setdefault(one.key, []).append(one)

    def find(self, key: str, value: str) -> Descriptor | None:
        found = self._known.get((key, value))
        if found is None:
            found = next((one for one in self._patterns.get(key, ()) if matches(one.value, value)), None)
        return self._known.get((key, "")) if found is None else found


def matches(pattern: str, text: str) -> bool:
    """Whether a text matches a pattern in which each `*` stands for any characters; each part is searched once, from the left."""
    first, *middle, last = pattern.split("*")
    at, end = len(first), len(text) - len(last)
    if not text.startswith(first) or not text.endswith(last) or end < at:
        return False
    for part in middle:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


@dataclass(frozen=True)
class Domain:
    """The limits of one domain. `headers`: whether responses carry header fields."""

    name: str
    root: Level
    headers: bool = True
    limits: set[NamedLimit] = field(default_factory=set)

    @property
    def limiter(self) -> str:
        return f"envoy {self.name}"

    def match(self, entries: Sequence[tuple[str, str]]) -> tuple[Descriptor | None, str]:
        """The descriptor found for all entries, or None, and the key of its state."""
        level, found, parts = self.root, None, []
        for key, value in entries:
            found = level.find(key, value)
            if found is None:
                return None, join_key([value for _, value in entries])
            level = found.children
            parts.append(found.value if found.shared else value)
        return found, join_key(parts)

    def name_limits(self, level: Level, above: str = "") -> None:
        for one in level.items:
            one.label = above + quote(one.key, safe="") + (f"={quote(one.value, safe='*')}" if one.value else "")
            if one.rate is not None and one.rate.limit is not None:
                one.named = NamedLimit(self.limiter, one.label, one.rate.limit)
                self.limits.add(one.named)
            self.name_limits(one.children, one.label + "/")


def join_key(values: Sequence[str]) -> str:
    """One text for the values of a descriptor; different values have different texts."""
    if len(values) == 1:
        return values[0]
    return "|".join([one.replace("\\", "\\\\").replace("|", "\\|") for one in values])


# Reading ------------------------------------------------------------------------------------------------------------


def period_us(text: str) -> int:
    try:
        return UNITS[text.lower()][1] if text.lower() in UNITS else duration_us(text)
    except InvalidLimit:
        raise ParseError(f"unknown unit {text!r}", f"write one of {', '.join(UNITS)}, or a period like 10s") from None


def not_empty(text: str) -> str:
    if not text:
        raise ParseError("expected a string, got an empty one", "write a name")
    return bounded_text(text)


def build_rate(fields: ParsedFields, context: ParseContext) -> RateLimit:
    name, replaces = fields.get("name", ""), frozenset(fields.get("replaces", ()))
    if name in replaces:
        raise ConfigurationError(f"the rate limit {name!r} can't replace itself; remove its own name from replaces")
    if fields.get("unlimited"):
        if "unit" in fields or "requests_per_unit" in fields:
            raise ConfigurationError("an unlimited rate limit has no unit; remove unit and requests_per_unit, or unlimited")
        return RateLimit(0, 0, None, name, True, replaces)
    if "unit" not in fields or "requests_per_unit" not in fields:
        raise ConfigurationError("incomplete rate_limit; write unit and requests_per_unit, or unlimited: true")
    count, period, algorithm = fields["requests_per_unit"], fields["unit"], fields.get("algorithm", "fixed window")
    burst = fields.get("burst", count if algorithm == "leaky bucket" else None)
    option = "" if burst is None else f" {'capacity' if algorithm.startswith('leaky') else 'burst'} {burst}"
    limit = parse_limit(f"{algorithm} {count}/{period}us{option}") if count else None
    return RateLimit(count, period, limit, name, False, replaces)


def build_descriptor(fields: ParsedFields, context: ParseContext) -> Descriptor | Invalid:
    value, children = fields.get("value", ""), Level(fields.get("descriptors", ()), context)
    shadow, shared = fields.get("shadow_mode", False), fields.get("share_threshold", False) and "*" in value
    quota, position = fields.get("quota_mode", False), fields.node.position
    return Descriptor(fields["key"], value, fields.get("rate_limit"), shadow, shared, quota, children, position)


def build_domain(fields: ParsedFields, context: ParseContext) -> Domain:
    domain = Domain(fields["domain"], Level(fields.get("descriptors", ()), context), fields.get("headers", True))
    domain.name_limits(domain.root)
    return domain


NAME, TEXT = Text("a non-empty string", not_empty, loose=True), Text("a string", bounded_text, loose=True)
FLAG = Field(Boolean(), "true or false")
REPLACED = Fields("replaces", {"name": Field(NAME, "of a rate limit", True)}, lambda fields, context: str(fields["name"]))
RATE_FIELDS = {
    "unit": Field(Text("a unit", period_us, "minute, or 10s"), "a unit, or any period"),
    "requests_per_unit": Field(Integer("requests_per_unit", 0, MAX_COUNT), "0 refuses everything"),
    "unlimited": FLAG,
    "name": Field(TEXT, "shown in responses, and named by `replaces`"),
    "replaces": Field(ListOf(REPLACED, "a list of names", 0, single=False), "limits that do not apply when this one does"),
    "algorithm": Field(Choice(*ALGORITHMS), "default: fixed window"),
    "burst": Field(Integer("burst", 1, MAX_COUNT), "size of a token bucket or leaky bucket"),
}
UNSUPPORTED = {"metadata": "it in Envoy's route; metadata in responses is not supported"}
FLAGS = ("shadow_mode", "quota_mode", "share_threshold", "detailed_metric", "value_to_metric")
DESCRIPTOR_FIELDS = {"key": Field(NAME, "of an entry", True), "value": Field(TEXT, "without it: each value on its own")}
DESCRIPTOR_FIELDS |= {"rate_limit": Field(Fields("rate_limit", RATE_FIELDS, build_rate), "the limit")}
DESCRIPTOR_FIELDS |= dict.fromkeys(FLAGS, FLAG)
DESCRIPTOR: Any = Fields("descriptor", DESCRIPTOR_FIELDS, build_descriptor, renamed=UNSUPPORTED)
DESCRIPTORS = DESCRIPTOR_FIELDS["descriptors"] = Field(ListOf(DESCRIPTOR, "a list", 0, 10_000, single=False), "the next entries")
DOMAIN_FIELDS = {"domain": Field(NAME, "its name", True), "descriptors": DESCRIPTORS, "headers": FLAG}
DOMAIN = Fields("domain", DOMAIN_FIELDS, build_domain)


def config_files(path: str) -> list[Path]:
    """The file itself, or all YAML files of a folder."""
    return sorted(one for one in Path(path).iterdir() if one.suffix in (".yaml", ".yml")) if Path(path).is_dir() else [Path(path)]


def load_domains(path: str) -> dict[str, Domain]:
    """The domains of a file or folder, by name. Raises PolicyError with all errors of a file."""
    found: dict[str, Domain] = {}
    for file in config_files(path):
        domain = read_domain(open_source(file, "Envoy limits")[0], str(file))
        if found.setdefault(domain.name, domain) is not domain:
            raise ConfigurationError(f"{file}: duplicate domain {domain.name!r}; write all its descriptors in one file")
    if not found:
        raise ConfigurationError(f"{path}: no .yaml file in this folder; write one for each domain")
    return found


def read_domain(data: bytes, file: str = "<text>") -> Domain:
    return read_source(data, DOMAIN, ParseContext(file, data.decode("utf-8-sig", "replace").splitlines()))
