"""A function that each user may call three times per minute."""

from limitkeeper import Limiter, RateLimited

limiter = Limiter("3/min")


@limiter.limit(key=lambda user: user)
def send_code(user: str) -> str:
    return f"a code was sent to {user}"


if __name__ == "__main__":
    for user in ("ann", "ann", "ann", "ann", "ben"):
        try:
            print(send_code(user))
        except RateLimited as refused:
            print(f"{user}: try again in {refused.decision.retry_after:.0f} seconds")
