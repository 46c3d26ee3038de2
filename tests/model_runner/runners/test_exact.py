"""In exact mode a token's logits are the same bits with and without drafts, in any batch, in bfloat16 too."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import draftwood_strategies
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.loading.model import BUNDLED_MODEL, LoadedModel, load_model
from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.torch.exact_attention import SUM_BLOCK, draft_limits
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy
from tests.model_runner.beside import assert_no_faults, create_beside, drafting_for_itself
from tests.model_runner.families import RANDOM_FAMILIES, VOCAB, adopted
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import engine_of, make_sequence

NEW_TOKENS = 50
Written = tuple[list[int], list[TokenLogprobs]]


@functools.cache
def model(family: str, dtype: torch.dtype) -> LoadedModel:
    if family == "bundled":
        loaded = load_model(BUNDLED_MODEL, dtype=str(dtype).removeprefix("torch."), max_context=320, exact=True)
    else:
        loaded = adopted(family, dtype)
    assert loaded.exact
    return loaded


@functools.cache
def prompts(family: str) -> list[tuple[int, ...]]:
    """Long enough that drafts meet the ends of blocks in many ways."""
    random = np.random.default_rng(1)
    lengths = (1, SUM_BLOCK - 20, SUM_BLOCK - 1, SUM_BLOCK + 3, SUM_BLOCK + 70)
    return [tuple(random.integers(8, VOCAB, n).tolist()) for n in lengths]


def outputs(engine: Engine, sequences: list[Sequence], preempt_every: int = 0) -> list[Written]:
    """What these sequences write together, one of which is preempted after every so many steps, if not 0."""
    written: dict[Sequence, Written] = {sequence: ([], []) for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
    for step in itertools.count(1):
        if not engine.has_work:
            break
        if preempt_every and step % preempt_every == 0 and engine.running > 1:
            engine._scheduler._preempt(engine._scheduler.running[step // preempt_every % engine.running])
        for output in engine.step():
            assert output.finish is None or output.finish.error is None
            written[output.sequence][0].extend(output.token_ids)
            written[output.sequence][1].extend(output.logprobs)
        engine.check()
    assert_no_faults(sequences)
    return list(written.values())


def sampled(prompt: tuple[int, ...], strategy: Strategy | None = None, temperature: float = 1.0) -> Sequence:
    sampling = SamplingParams(temperature=temperature, seed=3, logprobs=4)
    stop = StopParams(NEW_TOKENS, ignore_eos=True)
    return make_sequence("r", prompt, stop, sampling, strategy=strategy, max_draft_nodes=64)


def engine(family: str, dtype: torch.dtype, **options: Any) -> Engine:
    return engine_of(model(family, dtype), 64, **options)


@functools.cache
def plain(family: str, dtype: torch.dtype) -> list[Written]:
    """Each prompt alone, one token a step."""
    alone = engine(family, dtype)
    return [outputs(alone, [sampled(prompt)])[0] for prompt in prompts(family)]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.bfloat16) for family in (*RANDOM_FAMILIES, "bundled")),
        *((family, torch.float32) for family in ("llama", "bundled")),
    ],
)
def test_the_same_bits_with_any_draft_in_any_batch(family: str, dtype: torch.dtype) -> None:
    """After preemptions too: what was written token by token is computed again in chunks, and goes on from there."""
    wanted = plain(family, dtype)
    answers = {prompt: tokens for prompt, (tokens, _) in zip(prompts(family), wanted, strict=True)}
    for seed, preempt_every, options in (
        (1, 0, {}),
        (2, 0, {"prefill_chunk": 37}),
        (3, 6, {}),
        (4, 6, {"prefill_chunk": 90, "prefix_cache": False}),
    ):
        crowded, oracle = engine(family, dtype, max_running=5, **options), OracleStrategy(answers, VOCAB, seed)
        sequences = [sampled(prompt, oracle) for prompt in prompts(family)]
        assert outputs(crowded, sequences, preempt_every) == wanted
        assert (sum(sequence.stats.preemptions for sequence in sequences) > 0) == (preempt_every > 0)


@pytest.mark.parametrize("name", ["draft_model", "hybrid"])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gpt-neox"])
def test_the_same_bits_with_a_model_that_drafts(family: str, name: str) -> None:
    wanted = plain(family, torch.bfloat16)
    crowded = engine_of(drafting_for_itself(model(family, torch.bfloat16)), 64, max_running=5, prefill_chunk=37)
    sequences = [sampled(prompt, create_beside(crowded, name)) for prompt in prompts(family)]
    assert outputs(crowded, sequences, preempt_every=6) == wanted
    assert sum(sequence.stats.accepted_tokens for sequence in sequences) > 0


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "bundled"])
def test_the_same_bits_after_a_reused_prefix(family: str) -> None:
    """A prefix that another sequence read, or wrote as its answer, in part drafted."""
    first = prompts(family)[3]
    [(answer, _)] = outputs(engine(family, torch.bfloat16), [sampled(first)])
    turns = [(*first, *answer[:n], *range(9, 9 + extra)) for n, extra in ((0, 1), (10, 5), (37, 3))]
    unshared = engine(family, torch.bfloat16, prefix_cache=False)
    wanted = [outputs(unshared, [sampled(turn)])[0] for turn in turns]
    answers = {first: answer} | {turn: tokens for turn, (tokens, _) in zip(turns, wanted, strict=True)}
    shared, oracle = engine(family, torch.bfloat16), OracleStrategy(answers, VOCAB, seed=4)
    outputs(shared, [sampled(first, oracle)])
    for turn, expected in zip(turns, wanted, strict=True):
        sequence = sampled(turn, oracle)
        assert outputs(shared, [sequence]) == [expected]
        assert sequence.stats.cached_prompt_tokens >= len(first) // PAGE_SIZE * PAGE_SIZE


def test_real_text_in_bfloat16_with_every_strategy() -> None:
    questions = ["i want my money back!!", "how do i change my adress", "track order 5512"]
    tokenizer = model("bundled", torch.bfloat16).tokenizer
    asked = [tuple(tokenizer.encode_chat([{"role": "user", "content": q}]).tolist()) for q in questions]
    alone = engine("bundled", torch.bfloat16, prefix_cache=False)
    wanted = [outputs(alone, [sampled(prompt, temperature=0.0)])[0] for prompt in asked]
    for name in draftwood_strategies.strategy_names():
        strategy = draftwood_strategies.create(name)
        for _ in range(2):
            sequences = [sampled(prompt, strategy, temperature=0.0) for prompt in asked]
            assert outputs(engine("bundled", torch.bfloat16), sequences) == wanted, name


def test_exact_is_the_default_below_float32() -> None:
    assert load_model(BUNDLED_MODEL, dtype="bfloat16", runner="torch").exact
    assert not load_model(BUNDLED_MODEL, dtype="float32", runner="torch").exact


def test_any_number_of_threads_gives_the_same_bits() -> None:
    wanted = plain("bundled", torch.bfloat16)
    two = engine("bundled", torch.bfloat16, threads=2)
    assert outputs(two, [sampled(prompts("bundled")[-1])]) == wanted[-1:]


def test_drafts_stay_within_their_block() -> None:
    for position in (0, 1, SUM_BLOCK - 2, SUM_BLOCK - 1, SUM_BLOCK, 1000):
        levels, nodes, _ = draft_limits(position)
        assert (position + levels) // SUM_BLOCK == position // SUM_BLOCK
        assert (position + levels + 1) % SUM_BLOCK == 0
        assert nodes >= 64
