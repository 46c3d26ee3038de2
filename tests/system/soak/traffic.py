"""The requests of a soak: of every kind, valid and invalid, drawn at random from a seed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftwood_client import AsyncClient, DeadlineError, GenerateOptions, InvalidRequestError, ModelInfo, Prompt

MAX_TOKENS = 400
"""`max_tokens` of the longest answers to ordinary prompts."""
_SCHEMA = {
    "type": "object",
    "properties": {"intent": {"enum": ["cancel", "refund", "other"]}, "urgent": {"type": "boolean"}},
    "required": ["intent", "urgent"],
}
_INVALID: tuple[tuple[Prompt, GenerateOptions], ...] = (
    ("", {}),
    ([2**30], {}),
    ("hello", {"temperature": -1.0}),
    ("hello", {"top_p": 0.0}),
    ("hello", {"max_tokens": 2**30}),
    ("hello", {"strategy": "no-such-strategy"}),
    ("hello", {"regex": "("}),
    ("hello", {"stop": "x" * 1000}),
    ("hello", {"tenant": "a\nb"}),
)


class NotRefusedError(Exception):
    """The service accepted an invalid request."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Draws requests.

    Attributes:
        tenants: number of tenants; more than the service keeps, so that some are evicted and loaded again.
        first: kinds of the first requests: each one once, then they are drawn.
    """

    info: ModelInfo
    prompts: Sequence[Prompt]
    tenants: int
    first: Iterator[str] = field(default_factory=lambda: iter(KINDS))

    async def send(self, client: AsyncClient, draw: random.Random) -> str:
        """Sends one request, checks that it ends as expected, and returns its kind.

        Raises:
            DraftwoodError: the request failed.
            NotRefusedError: an invalid request did not fail.
        """
        kind = next(self.first, None) or draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        await KINDS[kind][1](self, client, draw)
        return kind

    def options(self, draw: random.Random, **more: Any) -> GenerateOptions:
        options: GenerateOptions = {
            "tenant": f"tenant-{draw.randrange(self.tenants)}",
            "max_tokens": draw.choice((1, 16, 64, 150)),
        }
        return {**options, **more}  # type: ignore[typeddict-item]


async def _question(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    await client.generate(draw.choice(traffic.prompts), **traffic.options(draw))


async def _strategy(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    chosen = {"strategy": draw.choice(traffic.info.strategies), "max_draft_nodes": draw.randrange(0, 65)}
    await client.generate(draw.choice(traffic.prompts), **traffic.options(draw, **chosen, token_details=True))


async def _sampled(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    settings = {
        "temperature": draw.uniform(0.1, 2.0),
        "top_k": draw.randrange(0, 100),
        "top_p": draw.uniform(0.1, 1.0),
        "min_p": draw.uniform(0.0, 0.3),
        "repetition_penalty": draw.uniform(0.8, 1.5),
        "presence_penalty": draw.uniform(-1.0, 1.0),
        "frequency_penalty": draw.uniform(-1.0, 1.0),
        "logit_bias": {draw.randrange(traffic.info.vocab_size): 3.0},
        "stop": ["\n\n", "thank"],
        "top_logprobs": draw.randrange(0, 5),
    }
    for name in ("min_p", "logit_bias"):
        if not getattr(traffic.info.abilities, name):
            del settings[name]
    chosen = dict(draw.sample(sorted(settings.items()), draw.randrange(1, len(settings))))
    options = traffic.options(draw, seed=draw.randrange(2**32), **{"temperature": 1.0, **chosen})
    await client.generate(draw.choice(traffic.prompts), **options)


async def _plain(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    await client.generate(draw.choice(traffic.prompts), **traffic.options(draw, drafting=False))


async def _left(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    """The client cancels after a few deltas."""
    deltas = draw.randrange(0, 20)
    async with client.stream(draw.choice(traffic.prompts), **traffic.options(draw, max_tokens=MAX_TOKENS)) as stream:
        async for _ in stream:
            deltas -= 1
            if deltas < 0:
                return


async def _late(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    """The deadline is often too short."""
    options = traffic.options(draw, ignore_eos=True)
    with contextlib.suppress(DeadlineError):
        await client.generate(draw.choice(traffic.prompts), timeout=draw.uniform(0.01, 0.5), **options)


async def _long(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    longest = traffic.info.max_context_tokens - 16
    prompt = [draw.randrange(traffic.info.vocab_size) for _ in range(draw.randrange(longest // 2, longest))]
    await client.generate(prompt, **traffic.options(draw, max_tokens=8))


async def _structured(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    formats = ({"json_schema": _SCHEMA}, {"regex": "[a-z]{3,12}( [a-z]{3,12}){0,3}"}, {"lark": 'start: "yes" | "no"'})
    await client.generate(draw.choice(traffic.prompts), **traffic.options(draw, max_tokens=64, **draw.choice(formats)))


async def _invalid(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    prompt, options = draw.choice(_INVALID)
    try:
        await client.generate(prompt, **options)
    except InvalidRequestError:
        return
    raise NotRefusedError(f"prompt {prompt!r} with {options} was not refused")


async def _tokenized(traffic: Traffic, client: AsyncClient, draw: random.Random) -> None:
    text = " ".join(draw.choices(("order", "refund", "naïve", "東京", "🙂"), k=draw.randrange(1, 200)))
    await client.detokenize((await client.tokenize(text)).token_ids)


Send = Callable[[Traffic, AsyncClient, random.Random], Awaitable[None]]

KINDS: dict[str, tuple[int, Send]] = {
    "question": (20, _question),
    "strategy": (20, _strategy),
    "sampled": (20, _sampled),
    "plain": (8, _plain),
    "left": (10, _left),
    "late": (8, _late),
    "long": (3, _long),
    "structured": (6, _structured),
    "invalid": (10, _invalid),
    "tokenized": (5, _tokenized),
}
"""Kinds of requests: weight and function. Not tuned; rarer kinds take longer or end at once."""
