"""A server on loopback that speaks the wire formats of OpenAI (chat completions, responses) and Anthropic (messages), with
streams, and enforces quotas of requests and tokens per minute on a given clock."""

from __future__ import annotations

import gzip
import json
from typing import Any

from http_server import Answer, ScriptedServer, Seen

from limitkeeper import FixedWindow, Limiter, MemoryStore

WORDS = ("a ", "few ", "words")


class LLMServer(ScriptedServer):
    """`requests` and `tokens` are quotas per minute. `answered` are the tokens (input, output) of each answer."""

    def __init__(
        self, clock: Any, requests: int = 1000, tokens: int = 1_000_000, output: int = 40, compress: bool = False
    ) -> None:
        super().__init__(self.complete)
        limits = {"requests": FixedWindow(requests, per="1min"), "tokens": FixedWindow(tokens, per="1min")}
        self._quota = Limiter(limits, MemoryStore(clock=clock))
        self.output, self.compress = output, compress
        self.answered: list[tuple[int, int]] = []
        self.refused = 0

    def complete(self, seen: Seen) -> Answer:
        body = json.loads(seen.body)
        # what the model counts is less than a quarter of the bytes, and it stops before the bound
        used = len(seen.body) // 6, min(self.output, body.get("max_tokens", body.get("max_completion_tokens", self.output)))
        decision = self._quota.hit("all", cost={"tokens": sum(used)})
        if not decision:
            self.refused += 1
            fields = {"Retry-After": str(int(decision.retry_after) + 1), "Content-Type": "application/json"}
            return Answer(429, fields, b'{"error": {"type": "rate_limit_error", "message": "slow down"}}')
        self.answered.append(used)
        forms = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}
        whole, events = forms[seen.path](body, *used)
        if body.get("stream"):
            return Answer(200, {"Content-Type": "text/event-stream"}, chunks=tuple(events))
        packed = self.compress and "gzip" in seen.headers.get("accept-encoding", "")
        fields = {"Content-Type": "application/json"} | ({"Content-Encoding": "gzip"} if packed else {})
        text = json.dumps(whole).encode()
        return Answer(200, fields, gzip.compress(text) if packed else text)


def event(data: Any, name: str = "") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def chat(body: dict[str, Any], prompt: int, output: int) -> tuple[Any, list[bytes]]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    common = {"id": "c1", "created": 1, "model": body["model"]}
    message = {"role": "assistant", "content": "".join(WORDS)}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    whole = {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
    part = {**common, "object": "chat.completion.chunk", "usage": None}
    events = [event({**part, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}) for word in WORDS]
    if body.get("stream_options", {}).get("include_usage"):
        events.append(event({**part, "choices": [], "usage": usage}))
    return whole, [*events, event("[DONE]")]


def responses(body: dict[str, Any], prompt: int, output: int) -> tuple[Any, list[bytes]]:
    usage = {"input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output}
    whole = {"id": "r1", "object": "response", "model": body["model"], "output": [], "status": "completed", "usage": usage}
    started = {**whole, "status": "in_progress", "usage": None}
    events = [event({"type": "response.created", "response": started}, "response.created")]
    return whole, [*events, event({"type": "response.completed", "response": whole}, "response.completed")]


def messages(body: dict[str, Any], prompt: int, output: int) -> tuple[Any, list[bytes]]:
    common = {"id": "m1", "type": "message", "role": "assistant", "model": body["model"], "stop_sequence": None}
    content = [{"type": "text", "text": "".join(WORDS)}]
    usage = {"input_tokens": prompt, "output_tokens": output}
    whole = {**common, "content": content, "stop_reason": "end_turn", "usage": usage}
    begun = {**common, "content": [], "stop_reason": None, "usage": {"input_tokens": prompt, "output_tokens": 1}}
    deltas = [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in WORDS]
    events = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": output},
        },
        {"type": "message_stop"},
    ]
    return whole, [event(one, str(one["type"])) for one in events]
