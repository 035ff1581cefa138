"""The state of a fair share in a file beside that of a SharedStore: exact for all processes of the host.

Each decision runs under the lock of the store: the state is read if another process has changed it since, decided on, and written
as a whole. A process that dies at any moment leaves a complete state: a new one is written beside the present one, and then the
header, 32 bytes in one write, refers to it. (After a crash of the machine, what does not match starts it afresh.)

    header   revision, offset, length and CRC-32 of the state
    state    start, t, V, Σ q, Σ w, the number of tenants, when each guarantee is full, F of each tenant, their names
Rejected: cells of the store, which have three integers each; an undo journal of each change, for a state of some kilobytes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from zlib import crc32

from ..errors import StoreUnavailable
from ..garbage_collection import uncollected
from ..stores.shared import SharedStore
from .tenant_fair_share import AnswerFields
from .virtual_time_admission import FairAdmission

HEADER = struct.Struct("<4Q")
NUMBERS = struct.Struct("<qdddqq")
#: Separates names: no byte of UTF-8.
SEPARATOR = b"\xff"


class FileBackend:
    """One capacity of a SharedStore. `_revision` is that of the state in `queue`."""

    local = True

    def __init__(self, store: SharedStore, name: str, queue: FairAdmission) -> None:
        self.store, self.queue = store, queue
        self._revision = self._start_us = -1
        self._fresh = queue.dump()
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        self.path = f"{store.path}.share-{digest}"
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: can't open it: {error}") from None

    def _locked(self, method: str, tenant: str, cost: int, commit: bool) -> AnswerFields | None:
        """One call of the queue on the present state, which is then stored. No finaliser may do the same in between."""
        header = self._read()
        now_us = self.store.now_us()
        if self._start_us < 0:
            self._start_us = now_us
        if now_us - self._start_us < self.queue.now:  # the clock went back: time continues from where it was
            self._start_us = now_us - int(self.queue.now)
        elapsed = float(now_us - self._start_us)
        if commit:
            self._revision = -1  # until it is written: an exception may come in between
        if method == "refund":
            self.queue.refund(tenant, cost, elapsed)
            answer = None
        else:
            answer = self.queue.decide(tenant, cost, elapsed, commit)
        if commit:
            self._write(header)
        return answer

    def _read(self) -> tuple[int, int, int]:
        """The revision, offset and length of the state in the file; `queue` has that state."""
        revision, offset, length, checksum = HEADER.unpack(os.pread(self._fd, HEADER.size, 0).ljust(HEADER.size, b"\0"))
        if revision != self._revision or not length:
            if offset + length > os.fstat(self._fd).st_size:  # the header is damaged, too
                offset = length = 0
            data = os.pread(self._fd, length, offset) if length else b""
            if data and crc32(data) == checksum:
                self._restore(data)
            else:
                self.queue.restore(self._fresh)
                self._start_us = -1
            self._revision = revision
        return revision, offset, length

    def _restore(self, data: bytes) -> None:
        self._start_us, now, virtual, backlog, weight, tenants = NUMBERS.unpack_from(data)
        numbers = array("d")
        guarantees = len(self.queue.guarantees)
        end = NUMBERS.size + 8 * (guarantees + tenants)
        numbers.frombytes(data[NUMBERS.size : end])
        names = [name.decode("utf-8", "surrogatepass") for name in data[end:].split(SEPARATOR)] if tenants else []
        finish = dict(zip(names, numbers[guarantees:], strict=True))
        self.queue.restore((now, virtual, backlog, weight, finish, list(numbers[:guarantees])))

    def _write(self, header: tuple[int, int, int]) -> None:
        now, virtual, backlog, weight, finish, full_at = self.queue.dump()
        names = SEPARATOR.join([name.encode("utf-8", "surrogatepass") for name in finish])
        numbers = array("d", [*full_at, *finish.values()]).tobytes()
        data = NUMBERS.pack(self._start_us, now, virtual, backlog, weight, len(finish)) + numbers + names
        revision, offset, length = header
        place = HEADER.size if HEADER.size + len(data) <= offset else offset + length if length else HEADER.size
        try:
            if os.pwrite(self._fd, data, place) != len(data):
                raise OSError("the file system is full")
            os.pwrite(self._fd, HEADER.pack(revision + 1, place, len(data), crc32(data)), 0)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: can't write it: {error}") from None
        self._revision = revision + 1

    def decide(self, tenant: str, cost: int, commit: bool) -> AnswerFields:
        return uncollected(self.store.run_locked, self._locked, "decide", tenant, cost, commit)  # type: ignore[no-any-return]

    async def adecide(self, tenant: str, cost: int, commit: bool) -> AnswerFields:
        return self.decide(tenant, cost, commit)

    def refund(self, tenant: str, cost: int) -> None:
        uncollected(self.store.run_locked, self._locked, "refund", tenant, cost, True)

    async def arefund(self, tenant: str, cost: int) -> None:
        self.refund(tenant, cost)

    def close(self) -> None:
        self.store.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
