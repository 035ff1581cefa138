"""Fixed window: a counter for each window that was ever charged. Nothing is forgotten, so nothing can be mixed up."""

from __future__ import annotations

from typing import Any

from .answer import Answer, Terms


class FixedWindowModel(Terms):
    def __init__(self, limit: Any, birth: int = 0) -> None:
        super().__init__(limit)
        self.aligned: bool = limit.aligned
        #: Start of a window -> what is charged in it; only windows that hold something.
        self.used: dict[int, int] = {}
        #: A window charged ahead, after a gap: a rule that keeps three numbers does not know what the windows before it hold.
        self.after_gap = 0

    def window_of(self, moment: int) -> int:
        """The start of the window that `moment` lies in; from the first request: one is opened where there is none."""
        if self.aligned:
            return moment - moment % self.window
        return next((start for start in self.used if start <= moment < start + self.window), moment)

    def decide(self, now: int, cost: int, max_wait: int, not_before: int = 0) -> Answer:
        start, retry_at = None, None
        if cost <= self.count:
            start = max(now, not_before, max(self.used, default=0))  # behind what is reserved ahead, never before it
            window = self.window_of(start)
            if self.used.get(window, 0) + cost > self.count:  # whole into the next one
                start = window = window + self.window
            retry_at = start - max_wait
            if retry_at > now:
                start = None
            elif cost:
                self.note_gap(now, window)
                self.used[window] = self.used.get(window, 0) + cost
        last = max(self.used, default=0)
        left = self.count - self.used.get(self.window_of(now), 0) if last <= now else 0
        return Answer(start, retry_at, max(0, left), max(now, last + self.window if self.used else 0))

    def held(self, now: int) -> int:
        """What is charged in the running window and in later ones."""
        return sum(used for start, used in self.used.items() if now < start + self.window)

    def note_gap(self, now: int, window: int) -> None:
        last = max(self.used, default=0)
        if window not in self.used and self.used and now < last + self.window < window:
            self.after_gap = window

    def held_is_known(self, now: int) -> bool:
        """Whether a rule that keeps three numbers knows what is held: charges in two windows, one after the other."""
        running = [start for start in self.used if now < start + self.window]
        last = max(running, default=0)
        return last <= now or (last != self.after_gap and all(start >= last - self.window for start in running))

    def give_back(self, now: int, cost: int, charged_at: int | None, charged: int) -> None:
        """A window that has ended gives nothing back; a refund goes to the window that is running, and so does what was settled
        above its estimate. What another rate has admitted (`charged` is 0) is charged in the window of its start."""
        is_now = charged_at is None or (cost < 0 and (charged or charged_at < now))
        window = self.window_of(now if is_now else charged_at)
        if now < window + self.window:
            self.note_gap(now, window)
            self.used[window] = max(0, self.used.get(window, 0) - cost)
        self.used = {start: used for start, used in self.used.items() if used}

    def settle_on(self, state: tuple[int, int, int], gain: int, now: int) -> None:
        """A rule that keeps three numbers may have forgotten the charge of the running window; then it takes it for full."""
        window, used, _ = state
        here = self.window_of(now)
        if self.used.get(here, 0) < used == self.count and window == here:
            self.used[here] = used
