"""Calls of a language model under two limits at once: requests and tokens per minute.

A call reserves its estimate, waits until both limits allow it, and returns what it did not use.
"""

from limitkeeper import Limiter, TokenBucket

limits = Limiter({"requests": TokenBucket("60/min"), "tokens": TokenBucket("90000/min")})


def ask_model(prompt: str) -> tuple[str, int]:
    return "an answer", len(prompt) + 425  # the real one: the provider's client, and `usage.total_tokens`


def complete(prompt: str, max_tokens: int = 1000) -> str:
    estimate = len(prompt) + max_tokens
    with limits.reserve("my account", cost={"tokens": estimate}, max_wait=60) as reservation:
        answer, used = ask_model(prompt)
        reservation.settle({"requests": 1, "tokens": used})
    return answer


if __name__ == "__main__":
    print(complete("Why is the sky blue?"))
    print(limits.peek("my account").decisions)
