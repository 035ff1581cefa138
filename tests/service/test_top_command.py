"""`limitkeeper top`: decisions per second by rule, and the most refused keys."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from limitkeeper.cli import main
from limitkeeper.top_cli import rates_text


def status(at, requests, refused, passed, offenders=(), rule="api"):
    rules = [{"name": rule, "passed": passed, "refused": refused, "shadow_refused": 0, "waiting": 2}]
    workers, policy = {"answered": 1, "running": 2}, {"name": "shop"}
    found = {"at": at, "requests": requests, "refused": refused, "workers": workers, "policy": policy, "rules": rules}
    return json.loads(json.dumps({**found, "offenders": list(offenders)}))


def test_rates_are_differences_of_counters():
    """Of two seconds with 40 requests, 10 of them refused."""
    text = rates_text(status(100.0, 60, 5, 55), status(102.0, 100, 15, 85))
    assert text.splitlines()[0] == "shop: 20.0 requests/s, 25.0 % refused, 1 of 2 workers"
    assert text.splitlines()[2].split() == ["api", "15.0", "5.0", "0.0", "2"]


def test_counters_of_a_service_that_was_started_again_begin_at_zero():
    """No rate is negative, and a new rule is counted from its start."""
    text = rates_text(status(100.0, 60, 5, 55), status(101.0, 4, 1, 3))
    assert text.splitlines()[2].split() == ["api", "3.0", "1.0", "0.0", "2"]
    text = rates_text(status(100.0, 60, 5, 55, rule="old"), status(101.0, 61, 5, 3))
    assert text.splitlines()[2].split()[:2] == ["api", "3.0"]


def test_keys_are_printed_without_control_characters():
    """Clients choose keys."""
    offenders = [{"rule": "api", "key": "\x1b[2J", "count": 3}]
    text = rates_text(status(100.0, 0, 0, 0), status(101.0, 9, 9, 0, offenders))
    assert text.splitlines()[-1].split() == ["api", "\\x1b[2J", "3"]


def test_it_shows_a_running_service(service, capsys):
    """The rules, and the key that was refused, as a hash; with `--keys` as it is."""
    for _ in range(5):
        service.client.post("/v1/check", json={"limit": "checkout", "key": "user:top"})
    for arguments, shown in (["--keys"], True), ([], False):
        assert main(["top", "--admin", service.admin, "--interval", "10ms", *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("served: ")
        assert lines[2].split()[0] == "checkout"
        assert any("user:top" in line for line in lines) is shown


def test_a_service_that_does_not_answer(capsys):
    """The message names the address and the remedy."""
    assert main(["top", "--admin", "http://127.0.0.1:1"]) == 2
    assert "does not answer" in (printed := capsys.readouterr().err)
    assert "--admin" in printed


@pytest.mark.parametrize("token", ["secret-of-the-service\r", "secret-of-the-service\n", "secret-of-the-service\u2026"])
def test_a_token_that_can_not_be_sent_is_not_shown(capsys, monkeypatch, token):
    """A line end that a file has added to it is named instead."""
    monkeypatch.setenv("LIMITKEEPER_TOKEN", token)
    assert main(["top", "--admin", "http://127.0.0.1:1"]) == 2
    assert "LIMITKEEPER_TOKEN has a line end" in (printed := capsys.readouterr().err)
    assert "secret-of" not in printed


def test_a_key_that_is_not_utf_8_can_not_be_sent(capsys):
    """The remedy is the store itself, which takes any key."""
    assert main(["keys", "override", "checkout", "\udcff", "--admin", "http://127.0.0.1:1"]) == 2
    assert "write to the store with --policy FILE" in capsys.readouterr().err


@pytest.mark.parametrize("status", [200, 502])
@pytest.mark.parametrize("body", [b"[" * 100_000, b"<html>Bad Gateway</html>", b"[1]", b"5", b"{}", b'{"error": "no"}', b"\xff"])
def test_another_server_at_the_address_is_an_error(capsys, status, body):
    """An answer that is not that of a service is an error with the remedy, not a traceback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main(["top", "--admin", f"http://127.0.0.1:{server.server_port}", "--interval", "1ms"]) == 2
        finally:
            server.shutdown()
            thread.join()
    assert "name its admin port with --admin" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["soon", "-1s"])
def test_a_wrong_interval(interval, capsys):
    """It is an error, not a traceback."""
    assert main(["top", f"--interval={interval}"]) == 2
    assert capsys.readouterr().err.startswith("limitkeeper: ")
