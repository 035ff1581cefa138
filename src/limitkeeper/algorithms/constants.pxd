# The C side of constants.py.
cdef enum:
    PLAIN = 0
    REFUSED = -1
    NEVER = -2
    UNKNOWN = -1
    WAS_RESET = -2

cdef extern from *:
    """
    #define LIMITKEEPER_TOP 9007199254740991LL
    #define LIMITKEEPER_MAX_WAIT 4503599627370496LL
    """
    const long long TOP "LIMITKEEPER_TOP"
    const long long MAX_WAIT "LIMITKEEPER_MAX_WAIT"
