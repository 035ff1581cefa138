"""Starts a Kafka broker for a test: librdkafka's mock cluster, which speaks the protocol on a real port, in this process."""

from __future__ import annotations

from typing import Any


class Kafka:
    """The cluster lives as long as its producer. `brokers` is its address."""

    def __init__(self) -> None:
        from confluent_kafka import Producer

        options: dict[str, Any] = {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
        self.producer = Producer(options)
        found = self.producer.list_topics(timeout=30).brokers.values()
        self.brokers = ",".join(f"{broker.host}:{broker.port}" for broker in found)

    def send(self, topic: str, count: int) -> None:
        """Sends the numbers from 0, all with one key, so that they are in one partition and in order."""
        for number in range(count):
            self.producer.produce(topic, str(number).encode(), key=b"one")
        left = self.producer.flush(30)
        assert left == 0, f"{left} messages were not sent"
