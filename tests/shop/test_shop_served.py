"""`make shop` as a program: a process of its own, a real server, and the commands that it prints, run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from shop.lines import lines
from shop.serve import bound

import limitkeeper
from servers.valkey import free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MESSAGE = '{"code":"RATE_LIMITED","message":"Too many checkout attempts. Retry after 1s."}'
with_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


def program(**said: str) -> subprocess.Popen[str]:
    """The shop, started as `make shop` starts it, without a terminal."""
    paths = os.pathsep.join([str(Path(limitkeeper.__path__[0]).parent), str(EXAMPLES)])
    environment = {name: value for name, value in os.environ.items() if name not in ("PORT", "SHOP_SECONDS")}
    return subprocess.Popen(
        [sys.executable, "-m", "shop.serve"],
        env={**environment, "PYTHONPATH": paths, **said},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Open:
    """A running shop: its address, and its output until it was ready."""

    def __init__(self) -> None:
        self.process = program(PORT=str(free_port()), SHOP_SECONDS="inf")
        assert self.process.stdout is not None
        self.printed = ""
        for line in self.process.stdout:
            self.printed += line
            if line.startswith("Press Ctrl-C"):
                break
        found = re.search(r"http://127\.0\.0\.1:\d+", self.printed)
        assert found is not None, self.printed
        self.base = found[0]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=90)
        return self.process.returncode, rest


@pytest.fixture
def served() -> Iterator[Open]:
    shop = Open()
    yield shop
    if shop.process.poll() is None:
        shop.process.kill()
        shop.process.communicate()


def typed(command: str) -> str:
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False).stdout


@pytest.mark.slow
@with_curl
def test_the_printed_commands_have_the_described_answers(served):
    """The commands, as printed, get a 200 with what is left, a 429, each kind of degradation, and the catalog."""
    token, one, many, cached, later, less, catalog = lines(served.base)
    assert all(line.command in served.printed for line in lines(served.base))
    signed = "TOKEN=" + typed(f'{token.command}; echo "$TOKEN"').strip()  # logins are limited
    passed = typed(f"{signed}; {one.command}")
    assert passed.startswith("HTTP/1.1 200 OK\n")
    assert "\nx-ratelimit-limit: 10\nx-ratelimit-remaining: 9\n" in passed
    refused = next(filter(None, (typed(f"{signed}; {many.command}") for _ in range(3))), "")  # a stall refills
    assert refused.startswith("HTTP/1.1 429 Too Many Requests\n")
    assert "\nretry-after: 1\n" in refused
    assert refused.endswith(f"\n\n{MESSAGE}\n")
    assert typed(f"{signed}; {cached.command}").splitlines()[-1].startswith("cache-status: limitkeeper; hit; ttl=")
    assert typed(f"{signed}; {later.command}").startswith("HTTP/1.1 201 Created\n")
    assert typed(f"{signed}; {less.command}").endswith('{"lamp":"…","chair":"…","kettle":"…"}\n')
    found = dict(reversed(line.split()) for line in typed(catalog.command).splitlines())
    assert set(found) == {"200", "429"}
    assert 1000 <= int(found["200"]) < 1100  # more than a thousand only where a minute of the clock begins in between


def test_the_shop_answers_over_the_wire(served):
    """On one connection: the free checkouts pass, then come 429s with the time to wait, and the page counts them."""
    with httpx.Client(base_url=served.base, timeout=90) as client:
        client.headers["authorization"] = f"Bearer {client.post('/login?name=ada').text}"
        answers = [client.post("/checkout") for _ in range(10)]
        while answers[-1].status_code == 200 and len(answers) < 200:
            answers.append(client.post("/checkout"))
        counted = Counter(answer.status_code for answer in answers)
        assert counted.keys() == {200, 429}
        assert [answer.status_code for answer in answers[:10]] == [200] * 10
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert (refused.text, refused.headers["retry-after"]) == (MESSAGE, "1")
        assert f"{counted[429]} refused" in client.get("/").text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_shop_closes_in_order(served, number):
    """On SIGTERM it prints what it served and ends without an error."""
    httpx.get(f"{served.base}/products", timeout=90)
    code, rest = served.end(number)
    assert code == 0
    assert "The shop is closed: 1 requests, 1 passed, 0 refused." in rest


@pytest.mark.slow
@with_curl
def test_without_a_terminal_the_shop_shows_itself_and_ends():
    """Without a terminal it runs its own commands, shows a 200 and a 429, and ends."""
    process = program(PORT=str(free_port()))
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    shown = printed.split("Running the same commands:")[1]
    assert shown.index("HTTP/1.1 200 OK") < shown.index("HTTP/1.1 429 Too Many Requests") < shown.index(MESSAGE)


@pytest.mark.slow
def test_a_port_that_is_taken_is_left_to_its_owner():
    """Without PORT the next free port is used; with one that is in use, the program prints an error and does not start."""
    first, second = bound(None), bound(None)
    with first, second:
        taken = first.getsockname()[1]
        assert second.getsockname()[1] > taken
        process = program(PORT=str(taken), SHOP_SECONDS="inf")
        printed, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    assert f"serve: port {taken} is taken; choose another with PORT=" in printed


def test_an_invalid_number_of_seconds_is_an_error():
    """SHOP_SECONDS takes seconds; the error says so."""
    process = program(PORT=str(free_port()), SHOP_SECONDS="soon")
    printed, _ = process.communicate(timeout=90)
    assert process.returncode != 0
    assert "SHOP_SECONDS=soon: expected a number of seconds, or inf" in printed


@pytest.mark.parametrize("wish", ["http", "-1", "65536", "8000.5"])
def test_an_invalid_port_is_an_error(wish):
    """PORT takes the number of a port, and the error says so; empty, it is not set."""
    with pytest.raises(SystemExit, match=f"PORT={wish}: expected a number below 65536"):
        bound(wish)
    bound("").close()
