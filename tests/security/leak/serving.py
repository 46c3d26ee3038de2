"""Services over TLS whose answers are eavesdropped, and what they leak."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from draftwood_benchmarks.closed_loop import fitting
from draftwood_benchmarks.harness.prompts import read_prompts
from draftwood_benchmarks.harness.servers import server_process
from draftwood_client import AsyncClient, GenerateOptions, TlsConfig
from tests.certificates import make_certificate
from tests.security.leak.classifier import Features, Guessed, Seen, ask_all, guess

_CLIENTS = 2
_FLAGS = ("--threads", "1", "--stream-interval", "0", "--max-running", str(_CLIENTS))
"""A message for each step, as of models whose steps take longer than the default interval."""


def eavesdrop(flags: Sequence[str], prompts: int, repetitions: int, options: GenerateOptions) -> list[Seen]:
    """The answers of a service with these flags, and what the wire showed of them.

    The memory is warm: each prompt was answered once before.

    Args:
        prompts: the first of the bundled ones.
        repetitions: answers to each of them; half of them to train with.
    """
    return asyncio.run(_eavesdrop(flags, prompts, repetitions, options))


async def _eavesdrop(flags: Sequence[str], prompts: int, repetitions: int, options: GenerateOptions) -> list[Seen]:
    with TemporaryDirectory(prefix="draftwood-") as folder:
        certificate, key = make_certificate(Path(folder))
        pem = certificate.read_bytes()
        with server_process(*_FLAGS, "--tls-cert", str(certificate), "--tls-key", str(key), *flags) as server:
            async with AsyncClient(server.target, tls=TlsConfig(pem)) as client:
                info = await client.model_info()
                asked = (await fitting(client, info, read_prompts(None), options["max_tokens"] or 1))[:prompts]
            await ask_all(server.target, pem, asked, _CLIENTS, 1, options)
            return await ask_all(server.target, pem, asked, _CLIENTS, repetitions, {**options, "learn": False})


def guessed(answers: Sequence[Seen], features: Callable[..., Features]) -> Guessed:
    """How well the prompts of half of the answers are guessed, with the other half to train with."""
    halves = [[answer for answer in answers if answer.repetition % 2 == half] for half in (0, 1)]
    vectors = [np.array([features(one.records, one.sent_at) for one in half]) for half in halves]
    known, others = ([one.prompt for one in half] for half in halves)
    return guess(vectors[0], known, vectors[1], others)


def prices(answers: Sequence[Seen], base: Sequence[Seen]) -> dict[str, float]:
    """Medians of the answers over those of others: bytes, TTFT, tokens per second up to the last token, duration."""
    prices: dict[str, Callable[[Seen], float]] = {
        "bytes": lambda answer: answer.bytes,
        "ttft": lambda answer: answer.first_at - answer.sent_at,
        "tokens_per_second": lambda answer: answer.tokens / (answer.last_at - answer.sent_at),
        "duration": lambda answer: answer.ended_at - answer.sent_at,
    }
    return {
        name: round(statistics.median(map(of, answers)) / statistics.median(map(of, base)), 3)
        for name, of in prices.items()
    }
