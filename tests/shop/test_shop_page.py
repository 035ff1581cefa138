"""The page about the shop matches the shop: the same policy, the same commands, the same answers."""

from __future__ import annotations

import re
from pathlib import Path

from shop.lines import lines

from limitkeeper.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "shop.md").read_text()
POLICY = ROOT / "examples" / "shop" / "limitkeeper.yaml"


def test_the_page_shows_the_policy_whole():
    """The policy on the page is the file, line for line."""
    assert f"```yaml\n{POLICY.read_text()}```" in PAGE


def test_the_page_shows_the_lines_that_are_printed():
    """The commands on the page are what `make shop` prints."""
    for line in lines("http://127.0.0.1:8000"):
        assert f"```sh\n{line.command}\n```" in PAGE


def test_the_answers_on_the_page_are_those_of_the_shop(street):
    """Fields and bodies of the two answers, except a server's own fields and times."""
    ada = street.customer("ada")
    passed = ada.post("/checkout")
    ada.passes("POST", "/checkout", 9)
    for answer in (passed, ada.post("/checkout")):
        shown = next(block for block in re.findall(r"```http\n(.*?)```", PAGE, re.S) if f"HTTP/1.1 {answer.status} " in block)
        assert shown.rstrip().endswith(answer.body.decode())
        for name, value in answer.headers.items():
            assert (f"\n{name}: " if name == "ratelimit" else f"\n{name}: {value}\n") in shown


def test_the_explanation_of_the_policy_is_on_the_page(street, capsys):
    """`limitkeeper policy explain` prints what the page shows, as far as it shows it; and the check finds nothing."""
    shown = re.search(r"--request \"POST /checkout user=ada\"\n(.*?)…\n```", PAGE, re.S)
    assert shown is not None
    assert main(["policy", "explain", str(POLICY), "--request", "POST /checkout user=ada"]) == 0
    assert capsys.readouterr().out.startswith(shown[1])
    assert main(["policy", "check", str(POLICY)]) == 0
