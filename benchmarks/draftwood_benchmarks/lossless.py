"""`draftwood bench lossless`: greedy answers that differ from those of transformers, and by how little.

Two tokens whose logits are closer than rounding are a tie, and the order of summation decides it: another batch size, a
prefix from the cache or a draft beside it may choose the other token. Every answer is compared with what transformers'
own `generate` writes for the prompt alone. Where one differs, transformers computes the logits at the first different
token, and the gap between its own choice and the other one is reported. transformers with several prompts in a batch is
measured as well: its answers meet the same ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftwood_benchmarks.harness.models import ModelOptions, chosen_model, describe
from draftwood_benchmarks.harness.prompts import encode, read_prompts
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, progress, table
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidValueError

if TYPE_CHECKING:
    from rich.console import Console

    from draftwood_benchmarks.speed.contenders import EngineContender
    from draftwood_model_runner.engine import Engine
    from draftwood_model_runner.loading.model import LoadedModel
    from draftwood_strategies.draft import Int32Array

TIE = 1e-4
"""Largest gap in float32 that is rounding, relative to the largest logit; the runners' logits differ by up to 1e-5."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that is not the one of transformers.

    Attributes:
        at: its position in the answer.
        gap: by how much the logit of transformers' choice is larger, relative to the largest absolute logit there.
    """

    at: int
    gap: float


@dataclass(frozen=True, slots=True)
class Row:
    """The answers of one way to run the model.

    Attributes:
        together: prompts in one batch.
        tokens: tokens that were compared: up to the first difference of each answer.
    """

    engine: str
    strategy: str
    together: int
    answers: int
    tokens: int
    differences: list[Difference]

    @property
    def largest_gap(self) -> float | None:
        return max((one.gap for one in self.differences), default=None)

    def as_json(self) -> dict[str, object]:
        return {
            "engine": self.engine,
            "strategy": self.strategy,
            "together": self.together,
            "answers": self.answers,
            "identical": self.answers - len(self.differences),
            "tokens": self.tokens,
            "differences_per_1000_tokens": 1000 * len(self.differences) / self.tokens if self.tokens else None,
            "largest_gap": self.largest_gap,
        }


@command
def lossless(
    model: ModelOptions,
    output: OutputOptions,
    strategy: Annotated[str, typer.Option(help="The strategy that drafts.")] = "hybrid",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts of your own: JSON lines or text lines. The bundled questions by default."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, show_default=False, help="Prompts; all by default.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")] = 100,
    together: Annotated[int, typer.Option(min=2, help="Prompts of a batch, where several run at once.")] = 8,
) -> None:
    """How many greedy answers differ from those of transformers, one prompt at a time and in batches, with and without
    drafts, and how close the logits were where they do.

    Ends with status 1 if a float32 answer differs by more than rounding.
    """
    out = console()
    output.check()
    texts = read_prompts(prompts)[:limit]
    with chosen_model(model, out) as chosen:
        from draftwood_model_runner.engine import Engine, EngineConfig
        from draftwood_strategies import strategy_names

        if strategy not in strategy_names():
            raise InvalidValueError("strategy", strategy, f"it must be one of {', '.join(strategy_names())}")
        with out.status("Loading the model"):
            loaded = chosen.load()
            module = chosen.load_plain(loaded)
            engine = Engine(loaded, EngineConfig(max_running=together, threads=model.threads))
        encoded = [
            ids for text in texts if (ids := encode(loaded.tokenizer, text)).size + max_tokens < loaded.max_context
        ]
        if not encoded:
            raise BenchmarkError("no prompt fits the model beside --max-tokens")
        rows = _compare(out, engine, module, encoded, strategy, max_tokens, together)
    name = describe(chosen, loaded)
    title = f"{name}\nup to {max_tokens} tokens, greedy; compared with transformers, one prompt at a time"
    figures = [row.as_json() for row in rows]
    columns = {"engine": "{engine}", "strategy": "{strategy}", "together": "{together}"}
    columns["identical"] = "{identical} of {answers}"
    columns |= {"per 1,000 tokens": "{differences_per_1000_tokens:.2f}", "largest gap": "{largest_gap:.1e}"}
    out.print(table(title, figures, columns, texts=2))
    output.write(figures, model=name)
    worst = max((row.largest_gap or 0.0 for row in rows if row.engine == "draftwood"), default=0.0)
    if loaded.dtype == "float32" and worst > TIE:
        raise BenchmarkError(f"an answer differs where logits are {worst:.1e} apart, which is no rounding: report it")


def _compare(
    out: Console,
    engine: Engine,
    module: Any,
    prompts: list[Int32Array],
    strategy: str,
    max_tokens: int,
    together: int,
) -> list[Row]:
    from draftwood_benchmarks.speed.contenders import EngineContender, Task
    from draftwood_strategies import create

    loaded, task = engine.model, Task(max_tokens)
    references = [_generate(module, loaded, [ids], max_tokens)[0] for ids in progress(prompts, "transformers", out)]
    rows = []

    def add(name: str, drafts: str, size: int, answers: list[list[int]]) -> None:
        triples = list(zip(prompts, references, answers, strict=True))
        found = [_difference(module, *triple) for triple in triples]
        tokens = sum(len(mine) if one is None else one.at + 1 for (_, mine, _), one in zip(triples, found, strict=True))
        rows.append(Row(name, drafts, size, len(answers), tokens, [one for one in found if one is not None]))

    batches = [prompts[i : i + together] for i in range(0, len(prompts), together)]
    title = f"transformers, {together} at once"
    add("transformers", "none", together, [
        answer for batch in progress(batches, title, out) for answer in _generate(module, loaded, batch, max_tokens)
    ])  # fmt: skip
    for drafts in ("none", strategy):
        for size in (1, together):
            drafter = None if drafts == "none" else create(drafts)
            contender = EngineContender(engine, task, drafts, drafter, warm=False, number=size)
            add("draftwood", drafts, size, _answers(out, contender, prompts, size))
    return rows


def _answers(out: Console, contender: EngineContender, prompts: list[Int32Array], size: int) -> list[list[int]]:
    """What our engine writes, `size` prompts at a time."""
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    title = f"draftwood, {contender.strategy}, {size} at once"
    return [answer for batch in progress(batches, title, out) for answer in contender.answer_together(batch, seed=0)]


def _generate(module: Any, loaded: LoadedModel, prompts: Sequence[Int32Array], max_tokens: int) -> list[list[int]]:
    """What transformers writes for prompts in one batch, filled up on the left."""
    import torch

    longest = max(ids.size for ids in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.size :] = torch.from_numpy(prompt)
        mask[row, longest - prompt.size :] = 1
    ids, mask = ids.to(loaded.device), mask.to(loaded.device)
    with torch.inference_mode():
        written = module.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    return [_until_end(row, loaded.eos_token_ids) for row in written[:, longest:].tolist()]


def _until_end(tokens: list[int], eos: frozenset[int]) -> list[int]:
    """The tokens up to the first end-of-sequence token, which is included."""
    return tokens[: next((i for i, token in enumerate(tokens, 1) if token in eos), len(tokens))]


def _difference(module: Any, prompt: Int32Array, expected: list[int], answer: list[int]) -> Difference | None:
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
