"""Integer constants of the algorithms: the results REFUSED and NEVER, the largest exact integer, the longest wait.

`constants.pxd` defines the same constants in C; a test compares the two.
"""

#: 1 in the pure-Python build, 0 when compiled. The hot path tests this because reading `cython.compiled` is slower.
PLAIN = 1
#: `start` of a call that does not fit yet.
REFUSED = -1
#: `start` of a call that can never fit: its cost exceeds the capacity.
NEVER = -2
#: `charged_at` of a refund whose time of charge is not known; `reset_id` of a claim that is not known to be a charge.
UNKNOWN = -1
#: `reset_id` of a claim whose key was found to be reset after the charge: it gives nothing back.
WAS_RESET = -2
#: 2^53 − 1. No integer of an algorithm exceeds this, so that Lua's doubles give the same results bit for bit.
TOP = 9007199254740991
#: The longest wait, in microseconds (142 years); it stands for "without bound".
MAX_WAIT = 4503599627370496
