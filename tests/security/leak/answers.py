"""Asks the prompts again and again, and keeps what the wire showed of each answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwood_benchmarks.load.closed_loop import OWN_CONNECTION
from draftwood_benchmarks.load.questions import Text
from draftwood_client import NO_RETRY, AsyncClient, GenerateOptions, TlsConfig
from tests.security.leak.wire import Record, RecordReader, eavesdropped


@dataclass(slots=True)
class Seen:
    """An answer as the wire and its client saw it; times are of `time.perf_counter`.

    Attributes:
        prompt: its number.
        first_at, last_at: arrival of the first and of the last delta with tokens.
        ended_at: of the whole answer.
    """

    prompt: int
    repetition: int
    sent_at: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    tokens: int = 0
    records: list[Record] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.records)


async def ask_all(
    target: str, certificate: bytes, prompts: Sequence[Text], clients: int, repetitions: int, options: GenerateOptions
) -> list[Seen]:
    """Asks each prompt `repetitions` times, in random order; each client waits for its answer before it asks again.

    Raises:
        draftwood_client.DraftwoodError: a request failed.
    """
    order = [Seen(prompt, repetition) for repetition in range(repetitions) for prompt in range(len(prompts))]
    random.Random(0).shuffle(order)
    left = iter(order)

    async def work() -> None:
        async with (
            eavesdropped(target) as (address, wire),
            AsyncClient(address, tls=TlsConfig(certificate), retry=NO_RETRY, channel_options=OWN_CONNECTION) as client,
        ):
            await client.model_info()  # the connection is established
            for seen in left:
                await _ask(client, wire, prompts[seen.prompt], options, seen)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(work())
    return order


async def _ask(client: AsyncClient, wire: RecordReader, prompt: Text, options: GenerateOptions, seen: Seen) -> None:
    before = len(wire.records)
    seen.sent_at = time.perf_counter()
    async with client.stream(prompt, **options) as stream:
        async for delta in stream:
            seen.last_at = time.perf_counter()
            seen.first_at = seen.first_at or seen.last_at
            seen.tokens += len(delta.token_ids)
    seen.ended_at = time.perf_counter()
    seen.records = wire.records[before:]
