"""`limitkeeper keys` with the URL of a running service as its store."""

from __future__ import annotations

import json

import pytest
from running import Running

from limitkeeper.cli import main

TOKEN = "store-0123456789abcdef"


@pytest.mark.server
def test_the_keys_of_a_running_service(policy_file, capsys):
    """The list has the keys that the service has charged; a key that is reset starts as new there."""
    with Running("--admin-token", TOKEN, policy=policy_file) as service:
        url = f"limitkeeper://:{TOKEN}@127.0.0.1:{service.resp}"

        def keys(*words: str) -> str:
            assert main(["keys", *words, "--policy", str(policy_file), "--store", url]) == 0
            return capsys.readouterr().out

        for key in ("user:a", "user:a", "user:a", "user:b"):
            assert service.client.post("/v1/check", json={"limit": "checkout", "key": key}).status_code == 200
        found = json.loads(keys("list", "checkout", "--json"))
        assert [(one["key"], one["remaining"]) for one in found] == [("user:a", 0), ("user:b", 2)]
        assert service.client.post("/v1/check", json={"limit": "checkout", "key": "user:a"}).status_code == 429
        keys("reset", "checkout", "user:a")
        assert service.client.post("/v1/check", json={"limit": "checkout", "key": "user:a"}).status_code == 200
