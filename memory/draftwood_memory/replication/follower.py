"""Follows the streams of the memories that are in use here, and the purges of others.

It waits in one blocking read of all of them; on a cluster, where one call cannot span slots, it polls them in one
pipeline.
"""

from __future__ import annotations

import asyncio

from draftwood_memory.errors import MemoryStoreError, WrongTypeError
from draftwood_memory.local.process import Process
from draftwood_memory.local.resident import Resident
from draftwood_memory.replication.replica import Replica
from draftwood_memory.store.memories import entries_of
from draftwood_memory.store.naming import PURGES_KEY, stream_key, wake_key

BLOCK_SECONDS = 2.0
"""Of a blocking read. It bounds how long a store that stopped without closing its connections goes unnoticed."""
_COLLECT_SECONDS, _COLLECT_STREAM_SECONDS = 0.01, 50e-6
"""Between two reads, and more for each stream, since a read names them all."""
_POLL_SECONDS, _POLL_STREAM_SECONDS = 0.05, 200e-6
"""The same on a cluster, where reads do not block."""
_READ_ENTRIES = 64
"""Of a stream in one read. It bounds the size of an answer."""
_WAKE_TTL = 60


class Follower:
    """Runs on the memory thread. Every method that waits may raise MemoryStoreError.

    Attributes:
        reading: it waits in a blocking read.
    """

    def __init__(self, replica: Replica, process: Process) -> None:
        self.reading = False
        self._replica = replica
        self._residents = process.residents
        self._wake_key = wake_key(process.id.hex())
        self._woken = b"0-0"
        self._followed: frozenset[Resident] = frozenset()
        self._client = replica.memories.client.with_longer_timeout(BLOCK_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    async def wake(self) -> None:
        """Ends a read that lacks memories which came into use since it began."""
        if self.reading and not self._live() <= self._followed:
            self.reading = False
            wake = ("XADD", self._wake_key, "MAXLEN", 1, "*", "w", 1), ("EXPIRE", self._wake_key, _WAKE_TTL)
            await self._replica.memories.client.commands(wake)

    async def follow(self) -> None:
        """One read of the streams that are live here; what they hold is learned."""
        self._followed = self._live()
        try:
            await self._read()
        except WrongTypeError:
            async with self._replica.lock:
                await self._replica.check(live_only=True)
            if self._followed <= self._live():  # none of them was postponed
                raise

    async def _read(self) -> None:
        streams = {stream_key(one.tag, one.generation or 0): (one, one.generation or 0) for one in self._followed}
        after = {key: one.position for key, (one, _) in streams.items()} | {PURGES_KEY: self._replica.processes.applied}
        if self._client.is_cluster:
            commands = [("XRANGE", key, b"(" + id_, "+", "COUNT", _READ_ENTRIES) for key, id_ in after.items()]
            answers = await self._client.results(commands, of_keys=True)
            found = {key: answer for key, answer in zip(after, answers, strict=True) if answer}
            if isinstance(error := found.get(PURGES_KEY), MemoryStoreError):
                raise error
            pause = _POLL_SECONDS + _POLL_STREAM_SECONDS * len(after)
        else:
            self.reading = True
            after[self._wake_key] = self._woken
            block = ("COUNT", _READ_ENTRIES, "BLOCK", round(1000 * BLOCK_SECONDS))
            try:
                answer = await self._client.command("XREAD", *block, "STREAMS", *after, *after.values())
            finally:
                self.reading = False
            found = {key.decode(): entries for key, entries in answer or ()}
            pause = _COLLECT_SECONDS + _COLLECT_STREAM_SECONDS * len(after) if found.keys() - {self._wake_key} else 0.0
        async with self._replica.lock:
            for key, entries in found.items():
                if isinstance(entries, MemoryStoreError):
                    self._replica.postpone(streams[key][0], entries)
                elif key in streams:
                    resident, generation = streams[key]
                    await self._replica.apply_entries(resident, generation, entries_of(entries))
                elif key == PURGES_KEY:
                    await self._replica.apply_purges()
                else:
                    self._woken = entries[-1][0]
        await asyncio.sleep(pause)

    def _live(self) -> frozenset[Resident]:
        """Those that learn what was read last are read on after that."""
        return frozenset(one for one in self._residents.all() if one.live and not one.learns)
