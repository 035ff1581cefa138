# The C side of verdict.py.
cdef enum:
    PLAIN = 0
    REFUSED = -1
    NEVER = -2
    UNKNOWN = -1

cdef extern from *:
    """
    #define HEADGATE_TOP 9007199254740991LL
    #define HEADGATE_MAX_WAIT 4503599627370496LL
    """
    const long long TOP "HEADGATE_TOP"
    const long long MAX_WAIT "HEADGATE_MAX_WAIT"
