"""The content of a shared file, read from outside: for tests that check whether it is consistent."""

from __future__ import annotations

import mmap
from typing import Any

from limitkeeper.stores.shared import layout as at


class Picture:
    """A shared file as it is now, walked in every direction; `problems` lists inconsistencies."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory, memoryview(memory).cast("q") as words:
            self.plan = at.regions(words[at.MAX_KEYS], words[at.LOG_ENTRIES])
            self.problems: list[str] = []
            self.chained = self._chains(words)
            self._cells(words)
            self._blocks(words)
            self._logs(words)
            self.header = {name: words[getattr(at, name)] for name in ("LOCK", "JOURNAL", "LIVE", "OVERFLOW_CELLS", "TAKEOVERS")}

    def _chains(self, words: Any) -> list[int]:
        found: list[int] = []
        for head in range(self.plan.heads, self.plan.cells):
            link = words[head]
            while link:
                found.append(link)
                cell = self.plan.cells + (link - 1) * at.CELL
                if words[cell + at.HASH] & self.plan.mask != head - self.plan.heads:
                    self.problems.append(f"cell {link} hangs in a chain that is not its own")
                if len(found) > words[at.HIGH]:
                    self.problems.append("a chain goes in circles")
                    return found
                link = words[cell + at.LINK] & 0xFFFFFFFF
        return found

    def _free(self, words: Any, first: int, base: int, size: int, link: int) -> list[int]:
        found: list[int] = []
        number = words[first]
        while number:
            found.append(number)
            if len(found) > 10_000_000:
                self.problems.append("a list of what is free goes in circles")
                break
            number = words[base + (number - 1) * size + link]
        return found

    def _cells(self, words: Any) -> None:
        used = list(range(1, words[at.HIGH] + 1))
        if sorted(self.chained) != used:
            self.problems.append("the cells in chains are not those in use")
        shared = sum(words[self.plan.cells + (n - 1) * at.CELL + at.TAG] >> 32 == at.OVERFLOW for n in used)
        if words[at.OVERFLOW_CELLS] != shared or words[at.LIVE] != len(used) - shared:
            self.problems.append("the number of keys is wrong")

    def _blocks(self, words: Any) -> None:
        taken: list[int] = []
        for number in self.chained:
            cell = self.plan.cells + (number - 1) * at.CELL
            size = words[cell + at.LINK] >> 32
            several = (words[cell + at.TAG] >> 16) & 0xFFFF == 0xFFFF
            for block in (words[cell + at.KEY] if size > at.INLINE else 0, words[cell + at.STATE] if several else 0):
                while block:
                    taken.append(block)
                    block = words[self.plan.blocks + (block - 1) * at.BLOCK]
        free = self._free(words, at.BLOCKS_FREE, self.plan.blocks, at.BLOCK, 0)
        if sorted([*taken, *free]) != list(range(1, words[at.BLOCKS_HIGH] + 1)):
            self.problems.append("some blocks are neither in use nor free, or both")

    def _logs(self, words: Any) -> None:
        free = self._free(words, at.LOGS_FREE, self.plan.logs, self.plan.log_words, 0)
        taken = []
        units = self._units(words)
        for number in self.chained:
            cell = self.plan.cells + (number - 1) * at.CELL
            log = words[cell + at.STATE + 2]
            if "log" in units.get((words[cell + at.TAG] >> 16) & 0xFFFF, "log") and log:
                taken.append(log)
                if not 0 <= words[self.plan.logs + (log - 1) * self.plan.log_words + 1] <= words[at.LOG_ENTRIES]:
                    self.problems.append(f"log {log} has more entries than places")
        if sorted([*taken, *free]) != list(range(1, words[at.LOGS_HIGH] + 1)):
            self.problems.append("some logs are neither in use nor free, or both")

    def _units(self, words: Any) -> dict[int, str]:
        """The limits of the directory by the numbers of their units."""
        found: dict[int, str] = {}
        start, base = 0, self.plan.directory
        while start < words[at.DIRECTORY]:
            kind, _, _, size = words[base + start : base + start + 4].tolist()
            count = (size + 7) // 8
            if kind == 2:
                found[len(found) + 1] = words[base + start + 4 : base + start + 4 + count].tobytes()[:size].decode()
            start += 4 + count
        return found
