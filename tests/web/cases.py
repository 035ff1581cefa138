"""The table that every framework passes: all cases, and those that are also played against real servers in real time.

The cases by subject: `cases_keys` (which requests share a limit), `cases_matching` (which rules apply), `cases_responses`,
`cases_outcomes` (events beyond a limit, and afterwards) and `cases_sample_policy` (a whole policy).
"""

from __future__ import annotations

from case_steps import Case
from cases_keys import KEYS
from cases_matching import MATCH
from cases_outcomes import OUTCOMES
from cases_responses import ANSWERS
from cases_sample_policy import SAMPLES

CASES: tuple[Case, ...] = (*KEYS, *MATCH, *ANSWERS, *OUTCOMES, *SAMPLES)
REAL: tuple[Case, ...] = tuple(case for case in CASES if case.real)

assert len({case.name for case in CASES}) == len(CASES), "two cases have one name"
