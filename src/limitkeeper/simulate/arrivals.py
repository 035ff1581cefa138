"""Arrivals: when a client sends, and for which of its users.

A rate profile is a piecewise linear rate over time. Constant rates, ramps, on/off phases and flash crowds are all profiles. The
next arrival is where the integral of the rate has grown by 1 (`spacing: constant`) or by an exponential draw of mean 1:

    ∫ rate dt = amount,  on one piece:  r·d + s·d²/2 = amount  ⇒  d = 2·amount / (r + √(r² + 2·s·amount))       s: slope

Users follow Zipf's law: the k-th has a share of 1 / k^s; s = 0 is uniform. Rejected: thinning, which draws and discards arrivals
at the highest rate; a profile from 500/s to 20 000/s would discard most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf, log, sqrt
from random import Random

POISSON, CONSTANT = "poisson", "constant"
#: Users that are drawn at a time.
BATCH = 4096
#: Pieces of a decaying flash crowd, and half-lives until it has ended.
PIECES, HALF_LIVES = 24, 6

#: (seconds, arrivals per second), by time; the last rate lasts.
Profile = Sequence[tuple[float, float]]


def on_off(rate: float, on_s: float, off_s: float, end_s: float) -> Profile:
    """`rate` for `on_s` seconds, then nothing for `off_s`, until `end_s`."""
    points, time = [], 0.0
    while time <= end_s:
        points += [(time, rate), (time + on_s, rate), (time + on_s, 0.0), (time + on_s + off_s, 0.0)]
        time += on_s + off_s
    return points


def flash_crowd(rate: float, at_s: float, peak: float, rise_s: float, half_life_s: float) -> Profile:
    """`rate`, which rises to `peak` within `rise_s` and then decays with `half_life_s`."""
    end = at_s + rise_s
    decay = [
        (end + share * HALF_LIVES * half_life_s, rate + (peak - rate) * 0.5 ** (share * HALF_LIVES))
        for share in (piece / PIECES for piece in range(PIECES))
    ]
    return [(0.0, rate), (at_s, rate), *decay, (end + HALF_LIVES * half_life_s, rate)]


def arrival_times(profile: Profile, spacing: str, rng: Random, start_us: int) -> Iterator[int]:
    """The times of all arrivals in µs; the first after one interval."""
    draw: Callable[[], float] = (lambda: -log(1.0 - rng.random())) if spacing == POISSON else (lambda: 1.0)
    pieces = [(a, ra, b, (rb - ra) / (b - a)) for (a, ra), (b, rb) in pairwise(profile) if b > a]
    last, rate = profile[-1]
    amount = draw()
    for begin, at_begin, end, slope in pieces:
        time, now_rate = begin, at_begin
        while True:
            inner = now_rate * now_rate + 2 * slope * amount
            divisor = now_rate + sqrt(inner) if inner >= 0 else 0.0
            step = 2 * amount / divisor if divisor > 0 else inf
            if time + step > end:
                left = end - time
                amount = max(0.0, amount - now_rate * left - slope * left * left / 2)
                break
            time += step
            now_rate = at_begin + slope * (time - begin)
            amount = draw()
            yield start_us + round(time * 1e6)
    if rate <= 0:
        return
    exact = last + amount / rate
    while True:
        yield start_us + round(exact * 1e6)
        exact += draw() / rate


def user_numbers(count: int, zipf: float, rng: Random) -> Iterator[int]:
    """Numbers of users from 0, the most frequent first."""
    if count == 1:
        while True:
            yield 0
    population = range(count)
    weights = list(accumulate((number + 1) ** -zipf for number in population)) if zipf else None
    while True:
        yield from rng.choices(population, cum_weights=weights, k=BATCH)
