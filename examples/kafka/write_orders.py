"""A burst of Kafka messages before a database: every order is written, at 100 writes per second, with at most 500 in memory.

    python examples/kafka/write_orders.py BROKERS DATABASE_URL [--count 1000] [--rate 100/s] [--capacity 500] [--chart FILE]

The queue is back-pressure to the consumer: it is paused when the queue is full, and still polled, so that it stays in its group.
An offset is stored after its order was written, so that orders that wait in memory when the program dies are delivered again; an
order that is written twice is one row. Prints what it did as JSON, and draws the writes of every second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import asyncpg
from confluent_kafka import Consumer, Message

from limitkeeper.charts import Line, Mark, line_chart
from limitkeeper.concurrency import shape

CREATE = """
CREATE TABLE IF NOT EXISTS orders (
    number integer PRIMARY KEY, started_us bigint NOT NULL, written timestamptz NOT NULL DEFAULT clock_timestamp())
"""
WRITE = "INSERT INTO orders (number, started_us) VALUES ($1, $2) ON CONFLICT DO NOTHING"


class Topic:
    """The messages of a consumer, which only the thread that iterates uses: a call of another thread would wait for every poll.
    Others leave their calls in a queue, and that thread makes them between two polls."""

    def __init__(self, brokers: str) -> None:
        self.consumer = Consumer(
            {
                "bootstrap.servers": brokers,
                "group.id": "orders",
                "auto.offset.reset": "earliest",
                "enable.auto.offset.store": False,  # an offset is stored when its message has been processed
                "auto.commit.interval.ms": 200,
                "session.timeout.ms": 6000,
            }
        )
        self.consumer.subscribe(["orders"])
        self.calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.stopped, self.closed = threading.Event(), threading.Event()
        self.pauses = 0

    def __iter__(self) -> Iterator[Message]:
        while not self.stopped.is_set():
            while not self.calls.empty():
                self.calls.get()()
            message = self.consumer.poll(0.05)  # a paused consumer is polled too, and has nothing
            if message is not None and message.error() is None:
                yield message
        while not self.calls.empty():
            self.calls.get()()
        self.consumer.close()  # commits the stored offsets
        self.closed.set()

    def pause(self) -> None:
        """`shape` calls it from the thread that reads."""
        self.pauses += 1
        self.consumer.pause(self.consumer.assignment())

    def resume(self) -> None:
        self.calls.put(lambda: self.consumer.resume(self.consumer.assignment()))

    def processed(self, message: Message) -> None:
        self.calls.put(lambda: self.consumer.store_offsets(message))


@dataclass
class Run:
    """The measurements: seconds of the writes on PostgreSQL's clock, and (seconds, length) of the queue."""

    writes: list[float] = field(default_factory=list)
    queued: list[tuple[float, int]] = field(default_factory=list)
    pauses: int = 0


async def write_all(options: argparse.Namespace) -> Run:
    """Writes until the table has all orders."""
    found, starts = Run(), []
    database = await asyncpg.connect(options.database)
    await database.execute(CREATE)
    written = await database.fetchval("SELECT count(*) FROM orders")
    topic = Topic(options.brokers)
    begun = 0.0
    orders = shape(topic, options.rate, options.capacity, pause=topic.pause, resume=topic.resume)
    orders.events.on("allowed", lambda event: starts.append(event.decision.start_us))
    async for message in orders:
        begun = begun or time.monotonic()
        found.queued.append((time.monotonic() - begun, orders.queued))
        written += await database.execute(WRITE, int(message.value()), starts[-1]) == "INSERT 0 1"
        topic.processed(message)
        if written == options.count:
            break
    topic.stopped.set()
    await asyncio.to_thread(topic.closed.wait, 30)
    rows = await database.fetch("SELECT extract(epoch FROM written - min(written) OVER ()) AS second FROM orders")
    await database.close()
    found.writes, found.pauses = [float(row["second"]) for row in rows], topic.pauses
    return found


def chart(run: Run) -> str:
    """The queue over time, and the writes of every second, as an SVG."""
    writes = sorted(Counter(int(second) for second in run.writes).items())
    lines = [
        Line("messages in the queue", run.queued[::5], "blue"),
        Line("writes in each second (PostgreSQL's clock)", [(second + 0.5, number) for second, number in writes], "red", True),
    ]
    marks = [Mark("capacity 500", 500, level=True), Mark("100 writes/s", 100, level=True)]
    return line_chart("1000 Kafka messages, 100 writes per second", "seconds", "messages", lines, marks).markup()


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes orders from Kafka to PostgreSQL at a steady pace.")
    parser.add_argument("brokers")
    parser.add_argument("database")
    parser.add_argument("--count", type=int, default=1000, help="ends when the table has so many orders")
    parser.add_argument("--rate", default="100/s")
    parser.add_argument("--capacity", type=int, default=500)
    parser.add_argument("--chart", type=Path, help="the SVG file to write")
    options = parser.parse_args()
    found = asyncio.run(write_all(options))
    if options.chart is not None:
        options.chart.write_text(chart(found), encoding="utf-8")
    most = max(length for _, length in found.queued)
    print(json.dumps({"written": len(found.writes), "most_queued": most, "pauses": found.pauses}))


if __name__ == "__main__":
    main()
