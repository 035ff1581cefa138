"""The parser of RESP commands: any bytes, in any pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from limitkeeper.service.resp_parser import MAX_ARGUMENTS, MAX_INLINE, CommandParser, ProtocolError

MAX = 4096
ARGUMENT = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\r\n", b"$1\r\na\r\n", b"*3", b"x" * 1500]))
COMMAND = st.lists(ARGUMENT, min_size=1, max_size=20)


def encode(command: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(command) + b"".join([b"$%d\r\n%b\r\n" % (len(one), one) for one in command])


def parse(data: bytes, max_size: int) -> tuple[list[list[bytes]], bytes]:
    """The commands in one piece of data, and the rest that is kept for later."""
    parser = CommandParser(max_size)
    return parser.feed(data), bytes(parser._rest)


def feed(pieces: list[bytes]) -> tuple[list[list[bytes]], bool]:
    parser = CommandParser(1 << 20)
    return [command for piece in pieces for command in parser.feed(piece)], parser.partial


@given(st.lists(COMMAND, max_size=6), st.lists(st.integers(0, 2000), max_size=8))
@example([[b"LK.HIT", b"api", b"a\r\nb"], [b"PING"]], [])
def test_commands_are_read_in_any_pieces(commands, cuts):
    """The parsed commands equal the packed ones, however they were cut, and nothing is left over."""
    data = b"".join(map(encode, commands))
    places = sorted({0, len(data), *[cut for cut in cuts if cut < len(data)]})
    pieces = [data[start:end] for start, end in pairwise(places)]
    assert feed(pieces) == (commands, False)


@given(st.lists(COMMAND, min_size=1, max_size=3), st.binary(max_size=30), st.integers(0, 300))
def test_changed_bytes_are_an_error_or_commands(commands, noise, place):
    """Only ProtocolError is raised, and the kept rest is never longer than one command may be."""
    data = b"".join(map(encode, commands))
    changed = data[:place] + noise + data[place + len(noise) :]
    try:
        found, rest = parse(changed, MAX)
    except ProtocolError:
        return
    assert len(rest) <= MAX
    assert all(found)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error_or_commands(data):
    """The same for bytes that are no command."""
    try:
        found, rest = parse(data, MAX)
    except ProtocolError:
        return
    assert data.endswith(rest)
    assert sum(map(len, found)) <= len(data)


def test_inline_commands_are_split_at_spaces():
    """As typed into telnet; empty lines and empty arrays are nothing."""
    assert parse(b"PING\r\nLK.HIT api  user\n\r\n*0\r\n*-1\r\n*1\r\n$4\r\nPING\r\nQU", MAX) == (
        [[b"PING"], [b"LK.HIT", b"api", b"user"], [b"PING"]],
        b"QU",
    )


@pytest.mark.parametrize(
    "data",
    [
        b"*1000000000\r\n",
        b"*%d\r\n" % (MAX_ARGUMENTS + 1),
        b"*99999999999999999999",
        b"*x\r\n",
        b"*1\r\n:1\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$5000\r\n",
        b"*1\r\n$3\r\nabcd\r\n",
        b"*1\r\n$536870912\r\n",
        b"x" * (MAX_INLINE + 1),
        b"*3\r\n" + b"$2000\r\n%b\r\n" % (b"x" * 2000) * 2 + b"$2000\r\n" + b"x" * 1000,
    ],
    ids=range(11),
)
def test_what_is_too_large_or_malformed_is_an_error_at_once(data):
    """No header makes the parser allocate what it declares."""
    with pytest.raises(ProtocolError):
        parse(data, MAX)


@given(
    st.lists(st.one_of(COMMAND.map(encode), st.sampled_from([b"PING a\n", b"\r\n", b"*0\r\n", b"*-1\r\n"])), max_size=6),
    st.integers(1, 9),
)
def test_single_bytes_are_parsed_as_one_piece_is(parts, size):
    """Arrays and inline commands, cut anywhere."""
    data = b"".join(parts)
    pieces = [data[place : place + size] for place in range(0, len(data), size)]
    assert feed(pieces) == feed([data])
