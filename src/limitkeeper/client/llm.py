"""TokenMeter: the tokens of LLM calls, for the wire formats of OpenAI (chat completions, responses) and Anthropic (messages).

    estimate:  input  = bytes of the request body / 4, rounded up
               output = max_completion_tokens, max_output_tokens or max_tokens of the body (times `n`), else `default_output`
    used:      `usage` of the response, or of its server-sent events

A request reserves the estimate and settles what the response says. A response that says nothing (a stream of OpenAI without
`stream_options: {"include_usage": true}`, one that broke off, a compression that is unknown) keeps the estimate charged.

Bounded whatever a server sends: bodies are read up to MAX_BODY bytes and events up to MAX_LINE, in linear time, also when they
are compressed. Rejected: a tokenizer, which is one per model and a dependency; pass `estimate=` to use one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..errors import ConfigurationError
from .client_limits import Amounts
from .spend_guard import Amount, decimal

#: Bytes of a request body that are parsed for its bound on the output.
MAX_REQUEST = 1 << 20
#: Bytes of a response body that are kept to read its usage.
MAX_BODY = 4 << 20
#: Bytes of a line of an event stream; longer lines are skipped.
MAX_LINE = 1 << 16
#: Compressed bodies are read as long as they expand by no more than this, beyond the first MAX_BODY bytes.
MAX_RATIO = 32
MAX_TOKENS = 10**9
OUTPUT_FIELDS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
INPUT_TOKENS = ("prompt_tokens", "input_tokens")
OUTPUT_TOKENS = ("completion_tokens", "output_tokens")
PER = 1_000_000
#: Clients stop reading at these, before the end of the body.
LAST_EVENTS = (b"[DONE]", b'"message_stop"', b'"response.completed"', b'"response.incomplete"')


class Usage(NamedTuple):
    """Tokens of one call."""

    input: int
    output: int


class TokenMeter:
    """Charges limits called "tokens", "input_tokens" and "output_tokens", and a spend guard by `prices`: those of a million input
    and output tokens. `estimate` replaces the rule for the tokens of a request body."""

    def __init__(
        self,
        *,
        default_output: int = 1024,
        prices: tuple[Amount, Amount] = (0, 0),
        estimate: Callable[[bytes], int] | None = None,
    ) -> None:
        self._default_output, self._estimate = default_output, estimate
        if not isinstance(prices, (tuple, list)) or len(prices) != 2:
            raise ConfigurationError(f"prices: expected two prices (input, output), got {prices!r}; write prices=('3', '15')")
        self._prices = decimal(prices[0]), decimal(prices[1])

    def estimate(self, body: bytes) -> Amounts:
        """What a request will use; one without a body uses nothing."""
        if not body:
            return self.amounts(Usage(0, 0))
        tokens = -(-len(body) // 4) if self._estimate is None else self._estimate(body)
        return self.amounts(Usage(min(MAX_TOKENS, tokens), self._output(body)))

    def amounts(self, usage: Usage) -> Amounts:
        spend = (usage.input * self._prices[0] + usage.output * self._prices[1]) / PER
        total = min(MAX_TOKENS, usage.input + usage.output)
        return {"tokens": total, "input_tokens": usage.input, "output_tokens": usage.output, "spend": spend}

    def _output(self, body: bytes) -> int:
        parsed = parse_json(body) if len(body) <= MAX_REQUEST else None
        if not isinstance(parsed, dict):
            return self._default_output
        bounds = [count for name in OUTPUT_FIELDS if (count := tokens_of(parsed.get(name))) is not None]
        return min(MAX_TOKENS, (bounds[0] if bounds else self._default_output) * max(1, tokens_of(parsed.get("n")) or 1))

    def reader(self, content_type: str, content_encoding: str) -> TokenReader:
        return TokenReader(self, "text/event-stream" in content_type.lower(), content_encoding.strip().lower())


def parse_json(text: bytes) -> Any:
    """A JSON value; None for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def tokens_of(value: object) -> int | None:
    """A number of tokens; None when it is not a plausible one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None


class TokenReader:
    """Reads the usage of one response, while its body passes."""

    def __init__(self, meter: TokenMeter, events: bool, encoding: str) -> None:
        self._meter, self._events = meter, events
        self._inflate = zlib.decompressobj(47) if encoding in ("gzip", "x-gzip", "deflate") else None  # 47: either header
        self._readable = encoding in ("", "identity", "gzip", "x-gzip", "deflate")
        self._inflatable = MAX_BODY
        self._kept = bytearray()
        self._skipping = self._ended = False
        self._input: int | None = None
        self._output: int | None = None

    def feed(self, chunk: bytes) -> None:
        """Takes a part of the body."""
        for plain in self._plain(chunk):
            if self._events:
                self._feed_events(plain)
            elif len(self._kept) + len(plain) <= MAX_BODY:
                self._kept += plain
            else:
                self._readable = False

    def _plain(self, chunk: bytes) -> Iterator[bytes]:
        """The chunk without compression, in parts of at most MAX_LINE bytes."""
        if self._inflate is None or not self._readable:
            yield from [chunk] if self._readable else []
            return
        self._inflatable += MAX_RATIO * len(chunk)
        try:
            while chunk and self._readable:
                plain = self._inflate.decompress(chunk, MAX_LINE)
                self._inflatable -= len(plain)
                self._readable = self._inflatable >= 0
                yield plain
                chunk = self._inflate.unconsumed_tail
        except zlib.error:
            self._readable = False

    def _feed_events(self, chunk: bytes) -> None:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            if not self._skipping and len(self._kept) + len(line) <= MAX_LINE:
                self._read_line(bytes(self._kept) + line)
            self._kept.clear()
            self._skipping = False
        if self._skipping or len(self._kept) + len(rest) > MAX_LINE:
            self._skipping = True
            self._kept.clear()
        else:
            self._kept += rest

    def _read_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            if b'"usage"' in line:
                self._read(parse_json(line[5:]))
            self._ended = self._ended or any(last in line for last in LAST_EVENTS)

    def _read(self, value: Any) -> None:
        """Takes the usage of an object: its own, or that of its `message` or `response`. Of several the last one counts."""
        if not isinstance(value, dict):
            return
        for holder in (value, value.get("message"), value.get("response")):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict):
                written = tokens_of(usage.get("cache_creation_input_tokens")) or 0
                for name in INPUT_TOKENS:
                    if (count := tokens_of(usage.get(name))) is not None:
                        self._input = count + written
                for name in OUTPUT_TOKENS:
                    if (count := tokens_of(usage.get(name))) is not None:
                        self._output = count

    def used(self, complete: bool) -> Amounts | None:
        """What the call has used; None when the response did not say, or was closed before its last event or byte."""
        if self._events:
            self._read_line(bytes(self._kept))
        elif self._readable:
            self._read(parse_json(bytes(self._kept)))
        if not (complete or self._ended):
            return None
        if self._input is None and self._output is None:
            return None
        return self._meter.amounts(Usage(self._input or 0, self._output or 0))
