"""The two answers that are no start: REFUSED (not yet) and NEVER (not ever); and the edge of exact integers.

`verdict.pxd` says the same to the C compiler; a test holds the two equal.
"""

#: Whether this is the plain source running: for the hot path, where looking at `cython.compiled` would cost.
PLAIN = 1
REFUSED = -1
NEVER = -2
#: `charged_at` when a refund does not say when the charge was made.
UNKNOWN = -1
#: Every number of a rule stays at or below this, so that Lua's doubles agree bit for bit.
TOP = 9007199254740991
#: The longest wait that can be asked for, in microseconds: 142 years.
MAX_WAIT = 4503599627370496
