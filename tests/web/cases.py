"""The table that every framework passes: all cases, and those that are also played against real servers in real time.

The cases lie by subject in `cases_keys` (who shares a limit with whom), `cases_match` (which requests are meant), `cases_answers`
(what the client is told), `cases_ways` (what happens beyond a limit, and afterwards) and `cases_sample` (a whole policy).
"""

from __future__ import annotations

from cases_answers import ANSWERS
from cases_keys import KEYS
from cases_match import MATCH
from cases_sample import SAMPLES
from cases_ways import WAYS
from steps import Case

CASES: tuple[Case, ...] = (*KEYS, *MATCH, *ANSWERS, *WAYS, *SAMPLES)
REAL: tuple[Case, ...] = tuple(case for case in CASES if case.real)

assert len({case.name for case in CASES}) == len(CASES), "two cases have one name"
