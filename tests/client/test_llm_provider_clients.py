"""The providers' own Python clients over the transport of httpx2. Their import takes seconds, so these tests are slow."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from client_kinds import CONTEXT
from llm_server import WORDS, LLMServer
from token_limits import Tokens

from limitkeeper.client import httpx2 as our_httpx2

pytestmark = pytest.mark.slow


def openai_client(limits, url):
    import openai

    transport = our_httpx2.RateLimitTransport(limits, httpx2.HTTPTransport(verify=CONTEXT))
    return openai.OpenAI(base_url=f"{url}/v1", api_key="k", http_client=httpx2.Client(transport=transport), max_retries=0)


def test_the_client_of_openai(clock):
    """The provider's own client works over the transport: whole answers, streams, responses; each is settled."""
    tokens = Tokens(clock)
    ask = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 100}
    with LLMServer(clock) as server, openai_client(tokens.limits, server.url) as client:
        assert client.chat.completions.create(**ask).choices[0].message.content == "a few words"
        stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        assert [part.choices[0].delta.content for part in stream if part.choices] == list(WORDS)
        assert client.responses.create(model="m", input="hello", max_output_tokens=100).usage.output_tokens == 40
    assert tokens.left() == {"requests": 97, "tokens": 10000 - sum(map(sum, server.answered))}


def test_the_client_of_anthropic(clock):
    """The provider's own async client works over the transport, also while several calls stream at the same time."""
    import anthropic

    tokens = Tokens(clock)
    ask = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}

    async def main(url):
        transport = our_httpx2.AsyncRateLimitTransport(tokens.limits, httpx2.AsyncHTTPTransport(verify=CONTEXT))
        http = httpx2.AsyncClient(transport=transport)
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", http_client=http, max_retries=0) as client:
            assert (await client.messages.create(**ask)).content[0].text == "a few words"

            async def text():
                async with client.messages.stream(**ask) as stream:
                    return await stream.get_final_text()

            assert await asyncio.gather(*[text() for _ in range(4)]) == ["a few words"] * 4

    with LLMServer(clock) as server:
        asyncio.run(main(server.url))
    assert tokens.left() == {"requests": 95, "tokens": 10000 - sum(map(sum, server.answered))}
