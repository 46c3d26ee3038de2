"""Learns and folds until it is killed; prints how many of its records the store has confirmed."""

from __future__ import annotations

import asyncio
import sys

from draftwood_service.memory.naming import MemoryName
from tests.service.memory.helpers import learn_output, memory_of


async def main(port: int, run: int) -> None:
    memory = memory_of(f"redis://127.0.0.1:{port}")
    resident = memory.residents.pin(MemoryName("t"))
    await memory.replica.follower.refresh(resident)
    number = 0
    while True:
        for _ in range(2):  # 300 runs must fit the index
            number += 1
            await learn_output(memory, "t", [1 + run * 2000 + number, *range(number % 14)], "none")
        await memory.replica.round()
        print(memory.counters().pushed, flush=True)
        resident.fold_due = True
        await memory.replica.folder.fold()


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
