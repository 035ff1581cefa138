"""Parses request logs: nginx and uvicorn access logs, JSON lines (k6's points too) and CSV rows, one request per line.

A line gives what it has: time, method, path, status, address, duration, and other named fields, which may be identities of a
policy (`tenant=acme` after an nginx line, or a JSON field). Durations without a unit in their name are seconds in nginx
(`$request_time`) and hey, and milliseconds in JMeter and k6; elsewhere `unit` says.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..errors import ConfigurationError

REFUSED_STATUS = 429
#: In seconds since 1970: later times can't be shown.
YEAR_10000 = 253_402_300_800
_FACTORS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "millis": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "ns": 1e-9}
#: Names of durations, with the unit of those that have a fixed one without saying it.
_DURATIONS = {"latency": "", "duration": "", "took": "", "time_taken": "", "response_time": ""}
_DURATIONS |= {"request_time": "s", "rt": "s", "response-time": "s", "elapsed": "ms"}
_NAMES = {
    "time": ("time", "timestamp", "ts", "@timestamp", "time_iso8601", "msec", "time_local", "offset"),
    "method": ("method", "request_method", "http_method"),
    "path": ("path", "uri", "request_uri", "url"),
    "request": ("request", "request_line"),
    "status": ("status", "status_code", "code", "responsecode", "status-code"),
    "ip": ("ip", "remote_addr", "client_ip", "remote_ip", "client"),
}
_QUOTED = r'"((?:[^"\\]|\\.)*)"'
_NGINX = re.compile(rf"(?P<ip>\S+) \S+ (?P<user>\S+) \[(?P<time>[^\]]{{1,40}})\] {_QUOTED} (?P<status>\d{{3}}) (?P<rest>.*)")
_UVICORN = re.compile(r"(?P<head>.{0,80}?)\[?(?P<ip>[0-9a-fA-F.:]{2,45})\]?:\d+ - " + _QUOTED + r" (?P<status>\d{3})(?P<rest>.*)")
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
_FIELD = re.compile(r'(?<![\w.-])([A-Za-z_][\w.-]*)=("[^"]*"|\S+)')  # names begin a run: its other characters are not tried


class MalformedLine(ValueError):
    """A line that is not one of the format; its text is the reason."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One request. `time` in seconds since 1970 and `duration` in seconds; None: the log does not have it."""

    time: float | None = None
    duration: float | None = None
    status: int = 200
    method: str = "GET"
    path: str = "/"
    ip: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        return self.status == REFUSED_STATUS

    @property
    def failed(self) -> bool:
        """An error of the service, or (status 0) no response."""
        return self.status >= 500 or self.status == 0


def unit_factor(unit: str) -> float:
    """Seconds in a unit of durations."""
    if unit not in _FACTORS:
        raise ConfigurationError(f"unknown unit {unit!r}; write one of {', '.join(_FACTORS)}")
    return _FACTORS[unit]


def duration_factor(name: str, unit: str) -> float | None:
    """Seconds in one unit of the field `name`; None: its name is not that of a duration."""
    word = name.strip().lower()
    if word in _DURATIONS:
        return unit_factor(_DURATIONS[word] or unit)
    base, _, suffix = word.replace("-", "_").rpartition("_")
    return _FACTORS[suffix] if base in _DURATIONS and suffix in _FACTORS else None


def parse_time(text: object) -> float:
    """Seconds since 1970: a number (seconds, or milliseconds above 10¹¹), ISO 8601, or nginx's 10/Oct/2026:13:55:36 +0200."""
    word = str(text).strip()
    try:
        seconds = _seconds(word)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < YEAR_10000:
        raise MalformedLine(f"expected a time, got {word!r:.40}")
    return seconds


def _seconds(word: str) -> float:
    with suppress(ValueError):
        number = float(word)
        return number / 1000 if number > 1e11 else number
    if "/" in word:
        return datetime.strptime(word, "%d/%b/%Y:%H:%M:%S %z").timestamp()
    found = datetime.fromisoformat(word.replace(",", "."))
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def parse_number(text: object, what: str) -> float:
    try:
        found = float(str(text).strip())
    except ValueError:
        raise MalformedLine(f"expected {what}, got {text!r:.40}") from None
    if not 0 <= found < 1e15:
        raise MalformedLine(f"expected {what} of at least 0, got {text!r:.40}")
    return found


def split_request(line: str) -> tuple[str, str]:
    """Method and path of "GET /orders?page=2 HTTP/1.1"; ("", "") for what clients send that is no request."""
    words = line.split(" ")
    return (words[0], words[1].partition("?")[0]) if len(words) >= 2 and words[1].startswith("/") else ("", "")


def duration_of(fields: Mapping[str, Any], unit: str) -> float | None:
    """The first duration among named fields, in seconds."""
    for name, value in fields.items():
        factor = duration_factor(name, unit)
        if factor is not None and value not in (None, "", "-"):
            return parse_number(value, "a duration") * factor
    return None


def parse_nginx(line: str, unit: str) -> LogEntry:
    """The combined format, with `$request_time` or named fields (`rt=0.123 tenant=acme`) behind it."""
    found = _NGINX.match(line)
    if found is None:
        raise MalformedLine("expected 'address - user [time] \"request\" status bytes …'")
    method, path = split_request(found[4])
    rest = found["rest"]
    fields = {name: value.strip('"') for name, value in _FIELD.findall(rest)}
    if found["user"] != "-":
        fields.setdefault("user", found["user"])
    duration = duration_of(fields, "s")
    if duration is None:
        numbers = [word for word in re.sub(_QUOTED, " ", rest).split() if re.fullmatch(r"\d+\.\d+", word)]
        duration = float(numbers[0]) if numbers else None
    time = parse_time(found["time"])
    return LogEntry(time, duration, int(found["status"]), method or "GET", path or "/", found["ip"], fields)


def parse_uvicorn(line: str, unit: str) -> LogEntry:
    """uvicorn's access log, with a timestamp before it and named fields behind it where its log_config adds them."""
    found = _UVICORN.match(line)
    if found is None:
        raise MalformedLine("expected 'INFO: address:port - \"request\" status'")
    stamp = _TIMESTAMP.search(found["head"])
    fields = {name: value.strip('"') for name, value in _FIELD.findall(found["rest"])}
    method, path = split_request(found[3])
    time = None if stamp is None else parse_time(stamp[0])
    return LogEntry(time, duration_of(fields, unit), int(found["status"]), method or "GET", path or "/", found["ip"], fields)


def parse_json(line: str, unit: str) -> LogEntry:
    """A JSON object per line; k6's `--out json` too, of which only the points of http_req_duration are requests."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedLine(f"expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise MalformedLine(f"expected a JSON object, got {line!r:.40}")
    if "metric" in value and "type" in value:
        return parse_k6_point(value)
    return entry_of(value, unit)


def parse_k6_point(value: Mapping[str, Any]) -> LogEntry:
    data = value.get("data")
    if value.get("metric") != "http_req_duration" or value["type"] != "Point" or not isinstance(data, dict):
        return NOT_A_REQUEST
    tags = data.get("tags")
    return entry_of({**(tags if isinstance(tags, dict) else {}), "time": data.get("time"), "duration": data.get("value")}, "ms")


NOT_A_REQUEST = LogEntry()


def entry_of(fields: Mapping[str, Any], unit: str) -> LogEntry:
    """An entry of named fields."""
    lower = {str(name).strip().lower(): value for name, value in fields.items()}
    found = {
        what: next((lower[name] for name in names if lower.get(name) not in (None, "")), None) for what, names in _NAMES.items()
    }
    method, path = split_request(str(found["request"] or ""))
    path = path or str(found["path"] or "/")
    if "://" in path:
        path = "/" + path.split("://", 1)[1].partition("/")[2]
    others = {name: str(value) for name, value in lower.items() if isinstance(value, (str, int)) and not isinstance(value, bool)}
    status = found["status"]
    return LogEntry(
        None if found["time"] is None else parse_time(found["time"]),
        duration_of(lower, unit),
        int(parse_number(status, "a status")) if status is not None and str(status).strip().isdigit() else 0 if status else 200,
        method or str(found["method"] or "GET"),
        path.partition("?")[0],
        None if found["ip"] is None else str(found["ip"]),
        others,
    )


def parse_plain(line: str, unit: str) -> LogEntry:
    """One latency per line: "200", or with a unit "200ms"."""
    found = re.fullmatch(r"([\d.]+(?:e-?\d+)?)\s*([a-z]*)", line.strip())
    if found is None or (found[2] and found[2] not in _FACTORS):
        raise MalformedLine("expected a latency like 200, 200ms or 0.2s")
    return LogEntry(duration=parse_number(found[1], "a latency") * unit_factor(found[2] or unit))


def csv_parser(header: str) -> Callable[[str, str], LogEntry]:
    """The parser of the rows below a CSV header."""
    names = next(csv.reader([header]))

    def parse_row(line: str, unit: str) -> LogEntry:
        cells = next(csv.reader([line]))
        if len(cells) != len(names):
            raise MalformedLine(f"expected {len(names)} columns, got {len(cells)}")
        entry = entry_of(dict(zip(names, cells, strict=True)), unit)
        if entry.duration is None:
            raise MalformedLine("the duration is empty")
        return entry

    return parse_row


Parser = Callable[[str, str], LogEntry]
PARSERS: Mapping[str, Parser] = {
    "nginx access log": parse_nginx,
    "uvicorn access log": parse_uvicorn,
    "JSON lines": parse_json,
    "latencies, one per line": parse_plain,
}


def find_parser(lines: Iterable[str], unit: str) -> tuple[str, Parser] | None:
    """The format of a log's first lines: a CSV header with a duration, or the first format that parses one of them."""
    first = [line for line in lines if line.strip()]
    names = next(csv.reader(first[:1]), [])
    if any(duration_factor(name, unit) for name in names):
        return "CSV", csv_parser(first[0])
    for line in first:
        for name, parser in PARSERS.items():
            try:
                parser(line.rstrip("\n"), unit)
            except MalformedLine:
                continue
            return name, parser
    return None
