"""Reads files of measurements: the format is found from the content, requests are streamed, and summaries are read whole.

A log may hold a few lines that are cut or foreign: they are skipped and counted. Above 5 % the file is rejected, with the first
such line: the figures would be those of another file. Requests with a time are grouped into windows, and windows of similar load
into the steps of a load–latency curve.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TextIO

from ..errors import ConfigurationError
from .load_latency_curve import LoadStep, check_rising, step_of
from .load_test_output import read_summary
from .percentiles import MAX_EXACT_SAMPLES, LatencySamples
from .request_log import NOT_A_REQUEST, LogEntry, MalformedLine, find_parser

#: Characters of a summary that are looked at, and of one line of a log.
MAX_SUMMARY, MAX_LINE = 2_000_000, 65_536
MAX_MALFORMED = 0.05
WINDOW_S = 10.0
#: Steps of a curve that is made of a log, and the fewest requests of one.
CURVE_STEPS, MIN_STEP_REQUESTS = 10, 20
FORMATS = (
    "latencies (one per line, CSV or JSON lines), access logs of nginx or uvicorn, output of wrk, hey, k6 or locust, or a CSV "
    "table with rps and p95_ms"
)


@contextmanager
def open_text(path: str | Path) -> Iterator[TextIO]:
    """A text file, decompressed if its name ends in .gz; what can't be read of it, or decompressed, is a ConfigurationError."""
    try:
        opened = gzip.open if str(path).endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8", errors="replace") as stream:
            yield stream
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"{path}: can't read the file: {reason.lower()}") from None


class LogReader:
    """The requests of a log, one by one. Afterwards: how many lines it has, how many were skipped, and the first of those."""

    def __init__(self, path: str | Path, unit: str = "ms") -> None:
        self.path, self.unit = str(path), unit
        self.format = ""
        self.lines = self.skipped = 0
        self.first_skipped = ""
        self.interrupted = False

    def __iter__(self) -> Iterator[LogEntry]:
        with open_text(self.path) as stream:
            head = list(islice(iter(lambda: stream.readline(MAX_LINE), ""), 20))
            if not any(line.strip() for line in head):
                raise ConfigurationError(f"{self.path}: the file is empty; expected {FORMATS}")
            found = find_parser(head, self.unit)
            if found is None:
                raise ConfigurationError(f"{self.path}:1: unknown format: {head[0].strip()!r:.60}; expected {FORMATS}")
            self.format, parser = found
            stream.seek(0)
            for line in iter(lambda: stream.readline(MAX_LINE), ""):
                self.lines += 1
                if not line.strip() or (self.lines == 1 and self.format == "CSV"):
                    continue
                try:
                    entry = parser(line.rstrip("\n"), self.unit)
                except MalformedLine as error:
                    self._skip(error)
                    continue
                if entry is not NOT_A_REQUEST:
                    yield entry
        self.check()

    def _skip(self, error: MalformedLine) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or f"{self.path}:{self.lines}: {error}"
        if self.skipped > 1000:
            self.check()

    def check(self) -> None:
        """Raises ConfigurationError when too many lines were malformed."""
        if self.skipped > MAX_MALFORMED * self.lines:
            raise ConfigurationError(
                f"{self.first_skipped}; {self.skipped} of {self.lines} lines are no lines of this format ({self.format}): "
                "remove them, or give the files of different formats apart"
            )

    def notes(self) -> list[str]:
        """What is left out, in sentences."""
        skipped = f"{self.skipped} of {self.lines} lines were skipped (first: {self.first_skipped})."
        return [
            *([skipped] if self.skipped else []),
            *(["Reading was interrupted; these are partial results."] * self.interrupted),
        ]


@dataclass(slots=True, eq=False)
class LoadWindows:
    """Requests by window of their arrival: durations, errors, refusals. At most `keep` requests; `full` says when it ended."""

    seconds: float = WINDOW_S
    keep: int = MAX_EXACT_SAMPLES
    windows: dict[int, tuple[array[float], list[int]]] = field(default_factory=dict)
    count: int = 0

    @property
    def full(self) -> bool:
        return self.count >= self.keep

    def add(self, entry: LogEntry) -> None:
        if entry.time is None or self.full:
            return
        self.count += 1
        number = int((entry.time - (entry.duration or 0.0)) // self.seconds)
        durations, counts = self.windows.setdefault(number, (array("d"), [0, 0]))
        if entry.failed or entry.refused:
            counts[int(entry.refused)] += 1
        elif entry.duration is not None:
            durations.append(entry.duration)

    def steps(self) -> list[LoadStep]:
        """The curve: windows of similar load together. The first and last window are partial and left out where others exist."""
        numbers = sorted(self.windows)
        numbers = numbers[1:-1] if len(numbers) > 3 else numbers
        sizes = {number: len(self.windows[number][0]) + sum(self.windows[number][1]) for number in numbers}
        top = max(sizes.values(), default=0)
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(round(sizes[number] * CURVE_STEPS / max(1, top)), []).append(number)
        found = [self._step(group) for _, group in sorted(groups.items()) if sum(sizes[n] for n in group) >= MIN_STEP_REQUESTS]
        return [step for step in found if step.percentiles]

    def _step(self, numbers: list[int]) -> LoadStep:
        samples = LatencySamples(one for number in numbers for one in self.windows[number][0])
        errors, refused = (sum(self.windows[number][1][kind] for number in numbers) for kind in (0, 1))
        return step_of(samples, self.seconds * len(numbers), None, errors, refused)


@dataclass(slots=True, eq=False)
class Measurements:
    """What a file holds: samples of latency (none in a summary), steps of load, and counts of responses."""

    source: str
    format: str = ""
    samples: LatencySamples = field(default_factory=LatencySamples)
    steps: list[LoadStep] = field(default_factory=list)
    requests: int = 0
    errors: int = 0
    refused: int = 0
    notes: list[str] = field(default_factory=list)


def read_measurements(
    path: str | Path, *, unit: str = "ms", window: float = WINDOW_S, keep: int = MAX_EXACT_SAMPLES
) -> Measurements:
    """Reads a file of any supported format. `unit` is that of numbers without one; `keep` bounds the memory."""
    with open_text(path) as stream:
        head = stream.read(MAX_SUMMARY + 1)
        summary = read_summary(head, str(path), unit) if head.strip() and len(head) <= MAX_SUMMARY else None
    if summary is None:
        return read_log(LogReader(path, unit), window, keep)
    steps = summary[1]
    check_rising(steps, str(path))
    totals = (sum(step.requests for step in steps), sum(step.errors for step in steps), sum(step.refused for step in steps))
    return Measurements(str(path), summary[0], LatencySamples(), list(steps), *totals)


def read_log(reader: LogReader, window: float = WINDOW_S, keep: int = MAX_EXACT_SAMPLES) -> Measurements:
    """The latencies and the curve of a log. Errors and refusals are counted and are no latencies; Ctrl-C ends it early."""
    found = Measurements(reader.path, samples=LatencySamples(keep=keep))
    windows = LoadWindows(window, keep)
    without = 0
    try:
        for entry in reader:
            found.requests += 1
            found.errors += entry.failed
            found.refused += entry.refused
            windows.add(entry)
            if entry.duration is None:
                without += 1
            elif not entry.failed and not entry.refused:
                found.samples.add(entry.duration)
    except KeyboardInterrupt:
        reader.interrupted = True
    found.format, found.notes = reader.format, reader.notes()
    if not found.samples.count:
        raise ConfigurationError(no_latencies(found, without))
    found.steps = windows.steps()
    if windows.full:
        found.notes.append(f"The load–latency curve covers the first {windows.count:,} requests.")
    return found


def no_latencies(found: Measurements, without: int) -> str:
    if not found.requests:
        return f"{found.source}: no requests were found ({found.format}); give a log with at least one"
    if without:
        return (
            f"{found.source}: no line has a duration ({found.format}); add $request_time to nginx's log_format, or a field like "
            "duration_ms=12.5 to uvicorn's log_config"
        )
    return f"{found.source}: all {found.requests} requests failed or were refused; there is no latency to plan with"
