"""Answers to prompts: by our engine in this process, and by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftwood_benchmarks.harness.report import BenchmarkError
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.sequence import Sequence as EngineSequence
from draftwood_strategies import Strategy
from draftwood_strategies.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class Task:
    """How each prompt is answered.

    Attributes:
        max_tokens: new tokens, at most.
        temperature: 0 is greedy.
        top_k, top_p: 0 and 1 keep all tokens.
        ignore_eos: write all of them, past end-of-sequence tokens.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = False


def sequences(
    prompts: Sequence[Int32Array], task: Task, strategy: Strategy | None = None, *, seed: int = 0, **request: Any
) -> list[EngineSequence]:
    """A sequence for each prompt, with seeds from `seed` on.

    Args:
        strategy: drafts and learns; None switches drafting off.
        request: further fields of the requests.
    """
    made = []
    for number, prompt in enumerate(prompts, seed):
        fields: dict[str, Any] = {
            "request_id": str(number),
            "prompt": prompt,
            "stop": StopParams(max_tokens=task.max_tokens, ignore_eos=task.ignore_eos),
            "sampling": SamplingParams(task.temperature, task.top_k, task.top_p, seed=number),
        }
        made.append(EngineSequence(Request(**fields | request), strategy))
    return made


def finish(engine: Engine, sequences: Sequence[EngineSequence]) -> None:
    """Runs sequences to their ends, at once. Raises BenchmarkError if one fails."""
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        step(engine)


def step(engine: Engine) -> None:
    """One step. Raises BenchmarkError if a sequence fails."""
    for output in engine.step():
        if output.finish is not None and output.finish.error is not None:
            raise BenchmarkError(f"the engine failed: {output.finish.error}") from output.finish.error


def generate(module: Any, prompts: Sequence[Int32Array], max_tokens: int, **options: Any) -> list[list[int]]:
    """What `generate` of transformers writes greedily after prompts in one batch, filled up on the left; behind an
    end-of-sequence token come others.

    Args:
        options: further ones of `generate`.
    """
    longest = max(ids.size for ids in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.size :] = torch.from_numpy(prompt)
        mask[row, longest - prompt.size :] = 1
    ids, mask = ids.to(module.device), mask.to(module.device)
    options = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0} | options
    written: list[list[int]] = module.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
    return written
