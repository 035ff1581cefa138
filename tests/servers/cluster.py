"""Starts a cluster of three primaries without command line tools: it assigns slots, sets epochs, and introduces the nodes."""

from __future__ import annotations

import time
from typing import Any

from servers.valkey import Valkey

SLOTS = 16384
#: The offset of a node's bus port from its own.
BUS = 10_000


class Cluster:
    """`nodes` primaries on loopback, each with its share of the slots."""

    def __init__(self, nodes: int = 3) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "10000", "--cluster-require-full-coverage", "no")
        self.nodes = [Valkey(*options, bus=BUS) for _ in range(nodes)]
        try:
            self._form()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def _form(self) -> None:
        share = SLOTS // len(self.nodes)
        for number, node in enumerate(self.nodes):
            last = SLOTS - 1 if number == len(self.nodes) - 1 else share * (number + 1) - 1
            with node.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", share * number, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        with self.nodes[0].client() as client:
            for node in self.nodes[1:]:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        self.settle()

    def settle(self) -> None:
        """Waits until every node reports that the cluster is well, and knows all slots."""
        end = time.monotonic() + 60
        while not all(self._is_well(node) for node in self.nodes):
            if time.monotonic() > end:
                raise RuntimeError("the cluster did not come together")
            time.sleep(0.05)

    def _is_well(self, node: Valkey) -> bool:
        with node.client() as client:
            received: Any = client.execute_command("CLUSTER", "INFO")
        text = received.decode() if isinstance(received, bytes) else str(received)
        return ("cluster_state:ok" in text or "'cluster_state': 'ok'" in text) and (
            f"cluster_slots_ok:{SLOTS}" in text or f"'cluster_slots_ok': '{SLOTS}'" in text
        )

    def node_id(self, number: int) -> str:
        with self.nodes[number].client() as client:
            received = client.execute_command("CLUSTER", "MYID")
        return received.decode() if isinstance(received, bytes) else str(received)

    def keeper(self, slot: int) -> int:
        """The node to which a slot was assigned at the start."""
        return min(slot // (SLOTS // len(self.nodes)), len(self.nodes) - 1)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
