"""One running service for the tests of a module."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import POLICY, Running


@pytest.fixture(scope="session")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("service") / "limitkeeper.yaml"
    path.write_text(POLICY)
    return path


@pytest.fixture(scope="module")
def service(policy_file: Path) -> Iterator[Running]:
    with Running(policy=policy_file) as running:
        yield running


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates of a server and a client that it has signed."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(line: str) -> None:
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True, timeout=60)

    openssl("req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=authority")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(f"req -new -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}")
        openssl(f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out {name}.pem")
    return folder
