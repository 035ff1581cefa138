"""One picture per algorithm: its level above, the arrivals and their decisions below."""

from __future__ import annotations

from draw.runs import MINUTE, SECOND, Mark, Point
from draw.traffic import NOON, TWO_O_CLOCK, time_of_day

from limitkeeper import Decision, FixedWindow, LeakyBucket, LeakyBucketQueue, SlidingWindowCounter, SlidingWindowLog, TokenBucket
from limitkeeper.charts.frame import Frame, level_axis, level_line
from limitkeeper.charts.svg import Drawing

from .sheet import arrivals_below, edges, panel, played, sheet

RATE, SIZE = 5, 10
#: 3 per second, a burst of 10, twice the rate for a while, silence, and 3 per second again.
BUSY = [
    *(NOON + i * SECOND // 3 for i in range(6)),
    *[NOON + 2_500_000] * 10,
    *(NOON + 2_600_000 + i * SECOND // 10 for i in range(14)),
    *(NOON + 6_600_000 + i * SECOND // 3 for i in range(5)),
]


def used(decision: Decision) -> float:
    """The used units of a limit that counts whole units."""
    return decision.limit - decision.remaining


def filled(decision: Decision) -> float:
    """The content of a bucket that drains at RATE: the time until it is empty, times the rate."""
    return decision.reset_after * RATE


def seconds(begin: int, end: int) -> list[tuple[int, str]]:
    return [(at, f"{(at - begin) // SECOND} s") for at in range(begin, end + 1, SECOND)]


def of_day(begin: int, end: int, step: int) -> list[tuple[int, str]]:
    return [(at, time_of_day(at)) for at in range(begin, end + 1, step)]


def top_line(drawing: Drawing, frame: Frame, level: float, words: str) -> None:
    """The line of the capacity."""
    y = frame.py(level)
    drawing.line(frame.x, y, frame.right, y, "red-line fine dash")
    drawing.text(frame.right, y - 7, words, "red small", "end")


def token_bucket() -> Drawing:
    drawing = sheet(
        'TokenBucket("5/s burst 10")',
        "A burst takes the saved tokens; after that, the refill sets the rate. Tokens above the burst are discarded.",
    )
    frame = panel(92, 160, NOON, NOON + 8 * SECOND, 0, 11)
    marks, line = played(TokenBucket("5/s burst 10"), BUSY, frame, lambda decision: SIZE - filled(decision))
    arrivals_below(drawing, frame, 262, marks, seconds(frame.begin, frame.end), 10, 1)
    level_axis(drawing, frame, (0, 5, 10), "tokens")
    level_line(drawing, frame, line)
    drawing.text(frame.px(NOON + 2_560_000), frame.py(9), "10 at once: all admitted,", "small")
    drawing.text(frame.px(NOON + 2_560_000), frame.py(7.9), "the bucket is empty", "small")
    drawing.text(frame.px(NOON + 5_120_000), frame.py(4), "refill: 5 tokens a second", "small")
    return drawing


def leaky_bucket() -> Drawing:
    drawing = sheet(
        'LeakyBucket("5/s", capacity=10)',
        "The meter: requests pour water in, it leaks at 5 a second, and what would overflow is refused.",
    )
    frame = panel(92, 160, NOON, NOON + 8 * SECOND, 0, 11)
    marks, line = played(LeakyBucket("5/s", capacity=SIZE), BUSY, frame, filled)
    arrivals_below(drawing, frame, 262, marks, seconds(frame.begin, frame.end), 10, 1)
    level_axis(drawing, frame, (0, 5, 10), "water")
    top_line(drawing, frame, SIZE, "capacity 10")
    level_line(drawing, frame, line)
    drawing.text(frame.px(NOON + 4_850_000), frame.py(7), "it leaks 5 a second", "small")
    drawing.text(frame.px(NOON + 5_400_000), frame.py(4), "the token bucket's arrivals and", "soft small")
    drawing.text(frame.px(NOON + 5_400_000), frame.py(2.9), "the same decisions, upside down", "soft small")
    return drawing


def leaky_bucket_queue() -> Drawing:
    drawing = sheet(
        'LeakyBucketQueue("5/s", capacity=10)',
        "The shaper: of 20 at once, 10 fit; one starts every 0.2 s, the last waits 1.8 s; the other 10 are refused.",
    )
    frame = panel(92, 140, NOON, NOON + 5 * SECOND, 0, 11)
    arrivals = [NOON, NOON + 333_333, NOON + 666_667, *[NOON + 1_200_000] * 20, *[NOON + 3_600_000] * 3]
    marks, line = played(LeakyBucketQueue("5/s", capacity=SIZE), arrivals, frame, filled, waits=True)
    arrivals_below(drawing, frame, 242, marks, seconds(frame.begin, frame.end), 1, 10)
    level_axis(drawing, frame, (0, 5, 10), "in the bucket")
    top_line(drawing, frame, SIZE, "capacity 10, including the one leaving now")
    level_line(drawing, frame, line)
    drawing.text(frame.px(NOON + 1_260_000), 330, "20 arrive here: 10 fit, 10 overflow", "small")
    return drawing


def fixed_window() -> Drawing:
    drawing = sheet(
        'FixedWindow("3/min")',
        "A counter that restarts at zero every full minute. At the boundary, twice the limit fits into one minute.",
    )
    frame = panel(92, 120, TWO_O_CLOCK, TWO_O_CLOCK + 140 * SECOND, 0, 4)
    at = [TWO_O_CLOCK + second * SECOND for second in (30, 40, 50, 55, 65, 75, 85, 95, 130)]
    windows = range(frame.begin, frame.end, MINUTE)
    marks, line = played(FixedWindow("3/min"), at, frame, used, also=edges(windows))
    for window in windows[::2]:
        left, right = frame.px(window), min(frame.right, frame.px(window + MINUTE))
        drawing.rect(left, frame.y, right - left, 175, "band")
    arrivals_below(drawing, frame, 222, marks, of_day(frame.begin, frame.end, 20 * SECOND), 1, 1)
    level_axis(drawing, frame, (0, 1, 2, 3), "counted")
    top_line(drawing, frame, 3, "limit 3")
    level_line(drawing, frame, line)
    left, right, y = frame.px(TWO_O_CLOCK + 29 * SECOND), frame.px(TWO_O_CLOCK + 89 * SECOND), frame.y + 6
    drawing.polyline([(left, y + 6), (left, y), (right, y), (right, y + 6)], "violet-line fine")
    drawing.text((left + right) / 2, y - 7, "6 admitted in one minute, 2:00:29 to 2:01:29", "violet small", "middle")
    return drawing


def sliding_window_log() -> Drawing:
    drawing = sheet(
        'SlidingWindowLog("5/min")',
        "Every admitted call is stored for one window. The sixth has to wait until the first is one minute old.",
    )
    frame = panel(92, 110, NOON, NOON + 140 * SECOND, 0, 6)
    at = [NOON + second * SECOND for second in (5, 10, 20, 40, 50, 55, 64, 65)]
    marks, line = played(SlidingWindowLog("5/min"), at, frame, used, also=edges(moment + MINUTE for moment in at))
    arrivals_below(drawing, frame, 306, marks, of_day(frame.begin, frame.end, 20 * SECOND), 1, 1)
    level_axis(drawing, frame, (0, 5), "in the log")
    top_line(drawing, frame, 5, "limit 5")
    level_line(drawing, frame, line)
    log_entries(drawing, frame, 220, marks)
    return drawing


def log_entries(drawing: Drawing, frame: Frame, y: float, marks: list[Mark]) -> None:
    """A bar for each entry, as long as it counts."""
    drawing.text(frame.right - 6, y + 9, "each entry counts for 60 s", "soft small", "end")
    for i, mark in enumerate(mark for mark in marks if mark.start is not None):
        left, right = frame.px(mark.at), frame.px(mark.at + MINUTE)
        drawing.rect(left, y + 14 * i, right - left, 8, "blue veil", round=4)
        drawing.line(left, y + 14 * i, left, y + 14 * i + 8, "blue-line bold")


def sliding_window_counter() -> Drawing:
    drawing = sheet(
        'SlidingWindowCounter("10/min")',
        "Two counters: this minute's calls, and the last minute's, weighted by how much of it is still in the window.",
    )
    frame = panel(92, 190, NOON, NOON + 150 * SECOND, 0, 11)
    at = [NOON + second * SECOND for second in (*range(5, 45, 5), 65, 70, 75, 80, 85, 90, 93, 100, 103)]
    # In thousandths of a call, so that `remaining`, a whole number, shows the weight as it fades.
    rule = SlidingWindowCounter("10000/min")
    minutes = edges(range(frame.begin, frame.end, MINUTE))
    marks, line = played(rule, at, frame, lambda decision: used(decision) / 1000, cost=1000, also=minutes)
    arrivals_below(drawing, frame, 292, marks, of_day(frame.begin, frame.end, 30 * SECOND), 1, 1)
    level_axis(drawing, frame, (0, 5, 10), "estimate")
    top_line(drawing, frame, 10, "limit 10")
    level_line(drawing, frame, line, "violet")
    level_line(drawing, frame, this_minute(marks, line), "blue")
    x = frame.px(NOON + 90 * SECOND)
    drawing.line(x, frame.py(0), x, frame.py(9), "soft-line thin dash")
    drawing.text(x, frame.py(10.4), "half way: 5 + 8 × ½ = 9, one more fits", "small", "middle")
    drawing.text(frame.px(NOON + 41 * SECOND), frame.py(8.4), "8 calls", "blue small")
    drawing.text(frame.px(NOON + 62 * SECOND), frame.py(5.4), "last minute, fading", "violet small")
    drawing.text(frame.px(NOON + 97 * SECOND), frame.py(2.6), "this minute", "blue small")
    return drawing


def this_minute(marks: list[Mark], line: list[Point]) -> list[Point]:
    """The calls admitted since the round minute, at each point; of two points of one moment, the first is before the call."""
    found: list[Point] = []
    for (moment, _), (after, _) in zip(line, [*line[1:], (-1, 0.0)], strict=True):
        last = moment - 1 if moment == after else moment
        found.append((moment, sum(mark.start is not None and moment - moment % MINUTE <= mark.start <= last for mark in marks)))
    return found
