"""Topologies of several servers, and how they fail over: a primary behind sentinels, and a cluster with a replica of one node."""

from __future__ import annotations

import time
from typing import Any

import redis

from servers.cluster import BUS, Cluster
from servers.sentinel import PATIENT_MS, Watched
from servers.valkey import Valkey

PATIENCE = 60


def no_delay(servers: list[Valkey]) -> None:
    """Otherwise a primary waits five seconds for more replicas before it sends its data to the first."""
    for server in servers:
        with server.client() as client:
            client.config_set("repl-diskless-sync-delay", 0)


class WatchedHouse(Watched):
    """`fail_over` kills the primary, and waits until the sentinels have made another; `mend` brings the old one back."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: Valkey | None = None
        no_delay(self.servers)

    def promote(self) -> None:
        """A requested failover: both servers stay alive."""
        before = self.primary().port
        self.failover()
        self._changed(before)

    def fail_over(self) -> None:
        self.dead = self.kill_primary()
        self._changed(self.dead.port)

    @property
    def alive(self) -> list[Valkey]:
        return [server for server in (*self.servers, *self.sentinels) if server.process is not None]

    def _changed(self, before: int) -> None:
        end = time.monotonic() + PATIENCE
        while self.primary().port == before or not self._is_primary(self.primary()):
            if time.monotonic() > end:
                raise RuntimeError("the sentinels made no other primary")
            time.sleep(0.02)

    def _is_primary(self, server: Valkey) -> bool:
        with server.client() as client:
            try:
                return bool(client.role()[0] in (b"master", "master"))
            except redis.RedisError:
                return False

    def mend(self) -> None:
        """Brings the dead one back as a replica, and waits until it follows: only then can there be another failover."""
        if self.dead is not None:
            self.dead.options = ("--replicaof", "127.0.0.1", str(self.primary().port))
            self.dead.start()
            no_delay([self.dead])
            self.dead = None
        self.down_after(PATIENT_MS)
        self.settle()

    def settle(self) -> None:
        """Waits until the primary has its replica, and every sentinel has found it."""
        end = time.monotonic() + PATIENCE
        while not self._follows() or not all(self._at_peace(sentinel) for sentinel in self.sentinels):
            if time.monotonic() > end:
                raise RuntimeError("the replica does not follow its primary")
            time.sleep(0.05)

    def _follows(self) -> bool:
        with self.primary().client() as client:
            try:
                return len(client.role()[2]) == 1
            except redis.RedisError:
                return False

    def _at_peace(self, sentinel: Any) -> bool:
        with sentinel.client(decode_responses=True) as client:
            received = client.sentinel_master(self.service)
            others = client.sentinel_slaves(self.service)
        return received["flags"] in ("master", {"master"}) and all("down" not in str(one["flags"]) for one in others)


class ReplicatedCluster(Cluster):
    """Three primaries, and one replica of the first. `fail_over` kills the first and lets its replica take over."""

    def __init__(self) -> None:
        super().__init__()
        options = self.nodes[0].options
        self.spare = Valkey(*options, bus=BUS)
        no_delay([*self.nodes, self.spare])
        try:
            self._follow(self.spare, self.nodes[0])
        except BaseException:
            self.close()
            raise

    def _follow(self, replica: Valkey, primary: Valkey) -> None:
        with replica.client() as client, primary.client() as leader:
            leader_id = leader.execute_command("CLUSTER", "MYID").decode()
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", primary.port)
            end = time.monotonic() + PATIENCE
            while True:
                try:
                    client.execute_command("CLUSTER", "REPLICATE", leader_id)
                    break
                except redis.ResponseError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
            while client.info("replication")["master_link_status"] != "up":
                if time.monotonic() > end:
                    raise RuntimeError("the replica does not follow its primary")
                time.sleep(0.05)
        self.settle()

    @property
    def alive(self) -> list[Valkey]:
        return [server for server in (*self.nodes, self.spare) if server.process is not None]

    def fail_over(self) -> None:
        """The first node dies; its replica is ordered to take its slots at once."""
        self.nodes[0].kill()
        with self.spare.client() as client:
            client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        self.nodes[0], self.spare = self.spare, self.nodes[0]

    def promote(self) -> None:
        """A requested failover: the replica catches up first, and nothing is lost."""
        with self.spare.client() as client:
            asked, end = 0.0, time.monotonic() + PATIENCE
            while client.info("replication")["role"] != "master":
                if time.monotonic() > end:
                    raise RuntimeError("the replica was not promoted")
                if time.monotonic() > asked + 6:  # it gives up after five seconds
                    asked = time.monotonic()
                    client.execute_command("CLUSTER", "FAILOVER")
                time.sleep(0.01)
        self.nodes[0], self.spare = self.spare, self.nodes[0]

    def mend(self) -> None:
        """Restarts the dead one; it finds its successor in its own configuration file, and follows it."""
        if self.spare.process is None:
            self.spare.start()
            no_delay([self.spare])
        with self.spare.client() as client:
            end = time.monotonic() + PATIENCE
            while client.info("replication").get("master_link_status") != "up":
                if time.monotonic() > end:
                    raise RuntimeError("the old primary does not follow the new one")
                time.sleep(0.02)
        self.settle()

    def close(self) -> None:
        super().close()
        if hasattr(self, "spare"):
            self.spare.close()
