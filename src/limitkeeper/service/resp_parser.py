"""Parser of RESP commands: arrays of bulk strings, and inline commands (words in one line), in bounded time and memory.

Nearly every command has no line end inside its arguments, so one `split` finds all parts of all pipelined commands; each length
is then compared with its argument. Whatever differs (a line end in a key, an argument of 1 KiB and more, an inline command, an
error, a command that has not arrived whole) is parsed part by part. The parser keeps the arguments that have arrived, and the
bytes of an unfinished argument until it is complete, so the work is linear in the bytes received, whatever their pieces.
Rejected: hiredis.Reader, which allocates what a header declares: 8 GB for the 13 bytes of `*1000000000`.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Most arguments of a command, and most bytes of an inline command.
MAX_ARGUMENTS, MAX_INLINE = 1024, 16_384
COUNTS = {b"*%d" % count: count for count in range(1, 17)}
SIZES = {b"$%d" % size: size for size in range(1024)}
#: The most digits of a count or a length.
MAX_DIGITS = 9
CRLF = b"\r\n"
ARRAY, BULK = b"*$"
#: First words of HTTP requests, which web pages may send to a loopback port. In an array they are names of commands.
HTTP = frozenset({b"POST", b"GET", b"HOST:", b"PUT", b"OPTIONS", b"DELETE", b"HEAD"})


class ProtocolError(ValueError):
    """Bytes that are no command: the connection can't go on."""


class CommandParser:
    """The commands of one connection, none larger than `max_size` bytes or with more than `max_arguments`. `larger` has the sizes
    of commands that may be larger, by their names."""

    def __init__(self, max_size: int, max_arguments: int = MAX_ARGUMENTS) -> None:
        self.max_size, self.max_arguments = max_size, max_arguments
        self.larger: Mapping[bytes, int] = {}
        self._rest = bytearray()  # received and not parsed yet
        self._needed = 0  # the length of the rest that completes the argument that it begins
        self._arguments: list[bytes] = []  # the unfinished command: its arguments so far, how many are missing, its bytes so far
        self._missing = self._size = 0
        self.partial = False  # whether a command has begun to arrive

    def feed(self, data: bytes, commands: list[list[bytes]] | None = None) -> list[list[bytes]]:
        """All commands that are complete now, added to `commands`. Raises ProtocolError; the commands before it are added."""
        commands = [] if commands is None else commands
        if self.partial:
            data = self._continue(data, commands)
        if data and not self._missing and self.max_arguments >= len(COUNTS):
            data = parse_short(data, commands)
        if data:
            self._parse_exactly(data, commands)
        return commands

    def _continue(self, data: bytes, commands: list[list[bytes]]) -> bytes:
        """Goes on with the unfinished command; returns what is to be parsed after it, or b"" while it stays unfinished."""
        rest = self._rest
        if rest:
            rest += data
            if self._missing:
                unfinished = len(rest) < self._needed
            else:
                unfinished = rest[0] != ARRAY and b"\n" not in data and len(rest) <= min(MAX_INLINE, self.max_size)
            if unfinished:
                return b""
            data = bytes(rest)
            rest.clear()
        if self._missing:
            data = data[self._parse_arguments(data, 0, commands) :]
        self.partial = bool(self._missing)
        return data

    def _parse_exactly(self, data: bytes, commands: list[list[bytes]]) -> None:
        """Parses part by part, and keeps the rest."""
        at, after = -1, 0
        while at < after < len(data):
            at = after
            if self._missing:
                after = self._parse_arguments(data, at, commands)
            elif data[at] == ARRAY:
                after = self._parse_count(data, at)
            else:
                after = self._parse_inline(data, at, commands)
        self._rest += data[after:]
        self.partial = bool(self._rest or self._missing)

    def _parse_inline(self, data: bytes, at: int, commands: list[list[bytes]]) -> int:
        """Where the next command begins; `at` when the line is unfinished. So do the other methods."""
        end = data.find(b"\n", at, at + MAX_INLINE + 1)
        if end < 0:
            if len(data) - at > min(MAX_INLINE, self.max_size):
                raise ProtocolError("too big inline request")
            return at
        words = data[at:end].split()
        if len(words) > self.max_arguments:
            raise ProtocolError(f"expected at most {self.max_arguments} arguments")
        if words and words[0].upper() in HTTP:  # no line after it is a command
            raise ProtocolError("this is not an HTTP port")
        if words:
            commands.append(words)
        return end + 1

    def _parse_count(self, data: bytes, at: int) -> int:
        found = parse_number(data, at + 1)
        if found is None:
            return at
        count, after = found
        if count > self.max_arguments:
            raise ProtocolError("invalid multibulk length")
        self._missing, self._size, self._needed = max(count, 0), after - at, 0  # *0 and *-1 are nothing
        return after

    def _parse_arguments(self, data: bytes, at: int, commands: list[list[bytes]]) -> int:
        while at < len(data):
            if data[at] != BULK:
                raise ProtocolError(f"expected '$', got {chr(data[at])!r}")
            found = parse_number(data, at + 1)
            if found is None:
                self._needed = 0
                break
            size, start = found
            most = self.larger.get(self._arguments[0], self.max_size) if self._arguments else self.max_size
            if size < 0 or size > most:
                raise ProtocolError("invalid bulk length")
            end = start + size
            if self._size + end + 2 - at > most:
                raise ProtocolError(f"a command is larger than {most} bytes")
            if len(data) < end + 2:
                self._needed = end + 2 - at
                break
            if data[end : end + 2] != CRLF:
                raise ProtocolError("expected a line end after an argument")
            self._arguments.append(data[start:end])
            self._size += end + 2 - at
            self._missing -= 1
            at = end + 2
            if not self._missing:
                commands.append(self._arguments)
                self._arguments = []
                break
        return at


def parse_short(data: bytes, commands: list[list[bytes]]) -> bytes:
    """Adds the complete commands of few and short arguments at the beginning of `data`; returns what follows them."""
    parts = data.split(CRLF)
    last = len(parts) - 1
    place = 0
    while place < last:
        count = COUNTS.get(parts[place], 0)
        end = place + 1 + 2 * count
        if not count or end > last:
            break
        arguments = parts[place + 2 : end : 2]
        for argument in arguments:
            place += 1
            if SIZES.get(parts[place]) != len(argument):
                break
            place += 1
        else:
            commands.append(arguments)
            place += 1
            continue
        place = end - 1 - 2 * count
        break
    if place == last and not parts[last]:
        return b""
    return data if place == 0 else CRLF.join(parts[place:])


def parse_number(data: bytes, at: int) -> tuple[int, int] | None:
    end = data.find(CRLF, at, at + MAX_DIGITS + 3)
    if end < 0:
        if len(data) - at > MAX_DIGITS + 2:
            raise ProtocolError("expected a length")
        return None
    text = data[at:end]
    if not text.removeprefix(b"-").isdigit():
        raise ProtocolError("expected a length")
    return int(text), end + 2
