"""A test of a limit that takes no time: the clock moves when the test moves it. Run it with: pytest test_with_a_clock.py"""

from limitkeeper import Limiter
from limitkeeper.testing import ManualClock, use_clock

limiter = Limiter("3/h")  # as an application declares it


def send_mail(address: str) -> bool:
    return bool(limiter.hit(address))


def test_a_user_gets_three_mails_an_hour() -> None:
    with use_clock(clock := ManualClock()):
        assert [send_mail("ann") for _ in range(4)] == [True, True, True, False]
        clock.advance(20 * 60)
        assert [send_mail("ann") for _ in range(2)] == [True, False]
