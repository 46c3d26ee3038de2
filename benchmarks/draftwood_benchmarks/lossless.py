"""`draftwood bench lossless`: greedy answers that differ from those of transformers, and by how little.

Two tokens whose logits are closer than rounding are a tie, and the order of summation decides it: another batch size, a
prefix from the cache or a draft beside it may choose the other token. Every answer is compared with what transformers'
own `generate` writes for the prompt alone. Where one differs, transformers computes the logits at the first different
token, and the gap between its own choice and the other one is reported. transformers with several prompts in a batch is
measured as well: its answers meet the same ties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from draftwood_benchmarks.harness.models import ModelOptions, check_strategies, choose_model, describe
from draftwood_benchmarks.harness.prompts import PromptsOption, encode, read_prompts
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, Rows, console, progress, table
from draftwood_benchmarks.peers.process import PLAIN
from draftwood_client.cli.options import command
from draftwood_strategies.arrays import Int32Array

if TYPE_CHECKING:
    from draftwood_model_runner.engine import Engine

TIE = 1e-4
"""Largest gap in float32 that is rounding, relative to the largest logit; the runners' logits differ by up to 1e-5."""


class Difference(NamedTuple):
    """The first token of an answer that is not the one of transformers.

    Attributes:
        at: its position in the answer.
        gap: by how much the logit of transformers' choice is larger, relative to the largest absolute logit there.
    """

    at: int
    gap: float


@command
def lossless(
    model: ModelOptions,
    output: OutputOptions,
    strategy: Annotated[str, typer.Option(help="The strategy that drafts.")] = "hybrid",
    prompts: PromptsOption = None,
    limit: Annotated[int | None, typer.Option(min=1, show_default=False, help="Prompts; all by default.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")] = 100,
    together: Annotated[int, typer.Option(min=2, help="Prompts of a batch, where several run at once.")] = 8,
) -> None:
    """How many greedy answers differ from those of transformers, one prompt at a time and in batches, with and without
    drafts, and how close the logits were where they do.

    Ends with status 1 if a float32 answer differs by more than rounding.
    """
    texts = read_prompts(prompts)[:limit]
    check_strategies([strategy])
    chosen = choose_model(model)
    with console.status("Loading the model"):
        from draftwood_model_runner.engine import Engine, EngineConfig

        loaded = chosen.load()
        module = chosen.load_plain(loaded)
        engine = Engine(loaded, EngineConfig(max_running=together, threads=model.threads))
    encoded = [encode(loaded.tokenizer, text) for text in texts]
    encoded = [ids for ids in encoded if ids.size + max_tokens < loaded.max_context]
    if not encoded:
        raise BenchmarkError("no prompt fits the model beside --max-tokens")
    rows = _compare(engine, module, encoded, strategy, max_tokens, together)
    name = describe(chosen, loaded)
    title = f"{name}\nup to {max_tokens} tokens, greedy; compared with transformers, one prompt at a time"
    columns = {"engine": "{engine}", "strategy": "{strategy}", "together": "{together}"}
    columns |= {"identical": "{identical} of {answers}", "per 1,000 tokens": "{differences_per_1000_tokens:.2f}"}
    output.report(table(title, rows, columns | {"largest gap": "{largest_gap:.1e}"}, texts=2), rows, model=name)
    worst = max(row["largest_gap"] or 0.0 for row in rows if row["engine"] == "draftwood")
    if loaded.dtype == "float32" and worst > TIE:
        raise BenchmarkError(f"an answer differs where logits are {worst:.1e} apart, which is no rounding: report it")


def _compare(
    engine: Engine, module: Any, prompts: list[Int32Array], strategy: str, max_tokens: int, together: int
) -> Rows:
    from draftwood_benchmarks.contenders import EngineContender
    from draftwood_benchmarks.harness.answers import Task, generate

    eos = engine.model.eos_token_ids

    def of_transformers(batch: list[Int32Array]) -> list[list[int]]:
        return [until_end(answer, eos) for answer in generate(module, batch, max_tokens)]

    def answers(name: str, size: int, answer: Callable[[list[Int32Array]], list[list[int]]]) -> list[list[int]]:
        batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        return [tokens for batch in progress(batches, f"{name}, {size} at once") for tokens in answer(batch)]

    expected = answers("transformers", 1, of_transformers)

    def row(name: str, drafts: str, size: int, written: list[list[int]]) -> dict[str, Any]:
        differences = [difference(module, *triple) for triple in zip(prompts, expected, written, strict=True)]
        return {"engine": name, "strategy": drafts, "together": size, **rates(written, differences)}

    rows = [row("transformers", PLAIN, together, answers("transformers", together, of_transformers))]
    for drafts in (PLAIN, strategy):
        for size in (1, together):
            contender = EngineContender(engine, Task(max_tokens), drafts)
            contender.begin(prompts[0], [])
            written = answers(f"draftwood, {drafts}", size, lambda batch: contender.answer_together(batch, 0))  # noqa: B023
            rows.append(row("draftwood", drafts, size, written))
    return rows


def rates(answers: Sequence[list[int]], differences: Sequence[Difference | None]) -> dict[str, Any]:
    """Of answers, and where each differs. "tokens" are those that were compared: up to the first difference."""
    different = [difference for difference in differences if difference is not None]
    pairs = zip(answers, differences, strict=True)
    tokens = sum(len(answer) if difference is None else difference.at + 1 for answer, difference in pairs)
    return {
        "answers": len(answers),
        "identical": len(answers) - len(different),
        "tokens": tokens,
        "differences_per_1000_tokens": 1000 * len(different) / tokens if tokens else None,
        "largest_gap": max((difference.gap for difference in different), default=None),
    }


def until_end(tokens: list[int], eos: frozenset[int]) -> list[int]:
    """The tokens up to the first end-of-sequence token, which is included."""
    return tokens[: next((i for i, token in enumerate(tokens, 1) if token in eos), len(tokens))]


def difference(module: Any, prompt: Int32Array, expected: list[int], answer: list[int]) -> Difference | None:
    """Where an answer first differs from the one expected; None if it is the same."""
    import torch

    if answer == expected:
        return None
    at = next((i for i, (a, b) in enumerate(zip(expected, answer, strict=False)) if a != b), None)
    if at is None:
        raise BenchmarkError(
            f"an answer ends after {len(answer)} tokens, and that of transformers after {len(expected)}"
        )
    ids = torch.tensor([[*prompt.tolist(), *expected[:at]]], device=module.device)
    with torch.inference_mode():
        logits = module(ids, use_cache=False).logits[0, -1].float()
    return Difference(at, float((logits[expected[at]] - logits[answer[at]]).abs() / logits.abs().max()))
