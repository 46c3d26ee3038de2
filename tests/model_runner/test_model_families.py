"""Every causal language model of transformers, small and random, by the runners of a CPU: the table of docs/models.md.

`make sweep` writes the table; the slow test compares it.
"""

from __future__ import annotations

import copy
import os
import re
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import DraftwoodError
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.arrays import Int32Array
from tests.model_runner.families import generate_with_gaps, taken_over
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import batch_of, engine_of
from tests.model_runner.small_models import CONTEXT, FAMILIES, NO_TEXT, small_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
WRITTEN = "DRAFTWOOD_WRITE_FAMILIES"
"""The environment variable with which the slow test writes rows, in place of comparing them."""
RUNNERS = ("torch", "openvino")
PROMPTS = (5, 30, 38, 90, 170, 260)
"""Tokens of the prompts: below, at and far beyond the windows of the small models."""
NEW_TOKENS = 24
DRAFT = 10
MIN_MARGIN = 2e-5
"""Where the two most probable tokens are nearer, as a share of the largest logit, rounding may decide between them. The
runners' logits differ from those of transformers by 2e-6 at most."""
TRIAL_SECONDS = 240
_GROUP = re.compile(r"^\| (attention|hybrid|recurrent) \| (\w+) \| (\w+) \| (.+) \|$", re.MULTILINE)
_FAMILY = re.compile(r"`([^`]+)`(?: \(([^)]+)\))?")
_TABLE = re.compile(r"(?<=<!-- table of families -->\n).*(?=<!-- end of the table -->)", re.DOTALL)


class Trial(NamedTuple):
    """What came of a family with a runner.

    Attributes:
        result: "trees", "chains" or "refused", as in the table.
        kind: of its layers: "attention", "recurrent", or "hybrid" with both.
        reason: why it is refused.
        compared: tokens of the answers of `generate`.
        accepted: draft tokens that were accepted.
    """

    result: str
    kind: str
    reason: str = ""
    compared: int = 0
    accepted: int = 0


@pytest.mark.parametrize(
    ("family", "runner", "result"),
    [
        ("llama", "torch", "trees"),
        ("llama", "openvino", "trees"),
        ("bart", "torch", "trees"),
        ("bart", "openvino", "trees"),
        ("roberta", "torch", "trees"),
        ("bloom", "torch", "chains"),
        ("falcon", "torch", "trees"),
        ("deepseek_v32", "torch", "trees"),
    ],
)
def test_drafted_answers_are_those_of_transformers(family: str, runner: str, result: str) -> None:
    trial = tried(family, runner)
    assert trial.result == result, trial
    assert trial.compared > 100
    assert trial.accepted > 50


def test_a_refusal_says_why() -> None:
    trial = tried("openai-gpt", "torch")
    assert trial.result == "refused"
    assert "in a cache of transformers" in trial.reason


def test_the_table_has_each_family_and_counts_them() -> None:
    rows = table_rows()
    assert list(rows) == list(FAMILIES)
    assert {row[1] for row in rows.values()} <= {"attention", "recurrent", "hybrid"}
    assert {result for row in rows.values() for result in row[2:]} <= {"trees", "chains", "refused"}
    assert table_of(rows) in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.timeout(len(RUNNERS) * TRIAL_SECONDS + 60)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_of_the_table(family: str) -> None:
    trials = [tried_apart(family, runner) for runner in RUNNERS]
    row = (trials[0].kind, *(trial.result for trial in trials))
    if os.environ.get(WRITTEN):
        write_row(family, row)
    else:
        assert table_rows()[family][1:] == row, trials


def table_rows() -> dict[str, tuple[str, ...]]:
    """By family: its well-known models, which people write there, its kind, and the result of each runner."""
    groups = _GROUP.findall(PAGE.read_text())
    rows = {family: (models, *group[:3]) for group in groups for family, models in _FAMILY.findall(group[3])}
    return dict(sorted(rows.items()))


def table_of(rows: dict[str, tuple[str, ...]]) -> str:
    """The text of the table: a line for all families of one kind with the same results."""
    served = (sum(row[2 + i] != "refused" for row in rows.values()) for i in range(len(RUNNERS)))
    shares = ", ".join(f"{name} {n} ({n / len(rows):.0%})" for name, n in zip(RUNNERS, served, strict=True))
    groups: dict[tuple[str, ...], list[str]] = {}
    for family, (models, *group) in sorted(rows.items()):
        groups.setdefault(tuple(group), []).append(f"`{family}`" + (f" ({models})" if models else ""))
    ordered = sorted(groups, key=lambda group: (group[0], -len(groups[group])))
    lines = [f"| {' | '.join((*group, ', '.join(groups[group])))} |" for group in ordered]
    heads = ["| layers | torch | OpenVINO | families |", "|---|---|---|---|"]
    return "\n".join(["", f"Of {len(rows)} families: {shares}.", "", *heads, *lines, ""])


def write_row(family: str, row: tuple[str, ...]) -> None:
    """Puts the family into the table, and takes out those that transformers no longer has."""
    rows = {name: cells for name, cells in table_rows().items() if name in FAMILIES}
    rows[family] = (rows.get(family, ("",))[0], *row)
    PAGE.write_text(_TABLE.sub(lambda _: table_of(rows) + "\n", PAGE.read_text()))


def tried_apart(family: str, runner: str) -> Trial:
    """The trial in a process of its own, which ends if it takes long; one that crashes sends nothing either."""
    with get_context("fork").Pool(1) as pool:
        try:
            return pool.apply_async(tried, (family, runner)).get(TRIAL_SECONDS)
        except TimeoutError:
            return Trial("refused", "attention", f"no result within {TRIAL_SECONDS} s")


def tried(family: str, runner: str) -> Trial:
    """Compares drafted greedy answers with those of transformers; the sequences join one after the other."""
    if family in NO_TEXT:
        return Trial("refused", "attention", NO_TEXT[family])
    try:
        module = small_model(family)
        kind = kind_of(family, module)
        module.generation_config, module.config.eos_token_id = GenerationConfig(), None
        prompts = _prompts(_vocab(module))
        expected = [_clear_answer(module, prompt) for prompt in prompts]
    except Exception as error:
        return Trial("refused", "attention", f"no small model of it can be made or run: {type(error).__name__} {error}")
    try:
        model = taken_over(
            copy.deepcopy(module), runner=runner, max_context=CONTEXT - 8, defaults="greedy", name="small"
        )
    except DraftwoodError as error:
        return Trial("refused", kind, str(error))
    answers = {tuple(prompt.tolist()): answer for prompt, answer in zip(prompts, expected, strict=True)}
    oracle = OracleStrategy(answers, _vocab(module), seed=0)
    batch = batch_of(prompts, StopParams(NEW_TOKENS), strategy=oracle, max_draft_nodes=DRAFT)
    _run_joining(engine_of(model, 32, max_running=len(prompts)), batch)
    wrong = sum(sequence.output[: len(answer)] != answer for sequence, answer in zip(batch, expected, strict=True))
    if wrong:
        return Trial("refused", kind, f"{wrong} of {len(batch)} answers differ from those of transformers")
    limits = model.factory.runner(CONTEXT).draft_limits
    result = "trees" if all(limits(position).branches for position in range(CONTEXT - 8)) else "chains"
    accepted = sum(sequence.stats.accepted_tokens for sequence in batch)
    return Trial(result, kind, compared=sum(map(len, expected)), accepted=accepted)


def kind_of(family: str, module: Any) -> str:
    """What kind of layers a model has, by its cache of transformers."""
    if family in ("rwkv", "xlstm"):  # their state is in no cache of transformers
        return "recurrent"
    try:
        layers = DynamicCache(config=module.config).layers
    except Exception:  # a config that transformers makes no such cache for
        return "attention"
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        return "attention"
    return "hybrid" if any(hasattr(layer, "get_mask_sizes") for layer in layers) else "recurrent"


def _vocab(module: Any) -> int:
    return int(module.config.get_text_config(decoder=True).vocab_size)


def _prompts(vocab: int) -> list[Int32Array]:
    random = np.random.default_rng(0)
    return [random.integers(3, vocab, length, np.int32) for length in PROMPTS]


def _run_joining(engine: Engine, batch: list[Sequence]) -> None:
    """Runs all, of which another joins in each second step."""
    waiting, steps = batch[::-1], 0
    while waiting or engine.has_work:
        if waiting and steps % 2 == 0:
            engine.add(waiting.pop())
        engine.step()
        steps += 1


def _clear_answer(module: Any, prompt: Int32Array) -> list[int]:
    """What `generate` writes, up to the first token that is nearly as probable as another."""
    tokens, gaps = generate_with_gaps(module, prompt.tolist(), NEW_TOKENS)
    clear = next((i for i, gap in enumerate(gaps) if gap < MIN_MARGIN), len(tokens))
    return tokens[:clear]
