"""Models that draft beside the target: what they draft is what they would write, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftwood_model_runner import models_beside
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.draft_heads import EagleHead, load_head
from draftwood_model_runner.loading.draft_models import model_drafter
from draftwood_model_runner.loading.loaded import DraftModel, LoadedModel, adopt
from draftwood_model_runner.loading.model import BUNDLED_MODEL
from draftwood_model_runner.loading.tokenizer import load_tokenizer
from draftwood_model_runner.model_drafts import ModelDrafts
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.base import StepBatch, StepInFlight
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.openvino import factory
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import EMPTY_TREE
from draftwood_strategies.arrays import Float32Array
from draftwood_strategies.model_drafts import LevelGains
from tests.draft_models import permuting_model, write_knowing_head
from tests.model_runner.beside import NAMES as MODEL_DRAFTS
from tests.model_runner.beside import (
    assert_no_faults,
    create_beside,
    drafting_for_itself,
    head_folder,
    interpret,
    runner_options,
    served_beside,
    with_head,
)
from tests.model_runner.families import generate, greedy, reference, served, taken_over, tiny, written_by
from tests.model_runner.sequences import batch_of, engine_of, make_sequence, run
from tests.model_runner.small_models import tiny_hybrid

DEPTH, NODES, TOKENS = 6, 24, 40
RUNNERS = ("openvino", "torch", "exact")
"""The last one is the torch runner in exact mode."""
QUESTIONS = ("where is my order", "i want a refund!!", "how do I change my adress")
SHORT_AND_LONG = [(1, 2, 3), (5,) * 70, tuple(range(50))]


def asked(model: LoadedModel) -> list[tuple[int, ...]]:
    return [tuple(model.tokenizer.encode_chat([{"role": "user", "content": q}]).tolist()) for q in QUESTIONS]


def added(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    name: str,
    tokens: int = TOKENS,
    nodes: int = NODES,
    tenant: str = "",
    **options: Any,
) -> list[Sequence]:
    """Sequences in an engine that draft by a new strategy, of which `options` are."""
    strategy = create_beside(engine, name, **options)
    sequences = batch_of(prompts, StopParams(tokens), strategy=strategy, max_draft_nodes=nodes, tenant=tenant)
    for sequence in sequences:
        engine.add(sequence)
    return sequences


def answers(engine: Engine, prompts: list[tuple[int, ...]], name: str, **options: Any) -> list[Sequence]:
    sequences = added(engine, prompts, name, **options)
    run(engine)
    assert_no_faults(sequences)
    return sequences


class Passes:
    """How many passes of models that draft there were, while it is patched in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        compute = ModelDrafts._pass

        def counted(drafts: ModelDrafts, batch: Any) -> Any:
            self.count += 1
            return compute(drafts, batch)

        monkeypatch.setattr(ModelDrafts, "_pass", counted)


def shallow() -> Any:
    """A random model whose steps take few launches."""
    return tiny("llama", num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


def with_knowing_head(folder: Path, runner: str) -> LoadedModel:
    model, _ = with_head(write_knowing_head(folder / "head"), runner, permuting_model())
    return model


def always_right(name: str, runner: str, folder: Path) -> tuple[LoadedModel, Any, list[tuple[int, ...]]]:
    """A model whose drafts by a strategy are right, the module that it must write as, and prompts."""
    if name == "head":
        return with_knowing_head(folder, runner), permuting_model(), SHORT_AND_LONG
    model = drafting_for_itself(served("bundled", runner))
    return model, reference("bundled"), asked(model)


@pytest.mark.parametrize("runner", ["openvino", "torch"])
@pytest.mark.parametrize("chunk", [512, 8])
def test_a_model_that_drafts_for_itself_is_always_right(runner: str, chunk: int) -> None:
    model = drafting_for_itself(served("bundled", runner))
    engine, prompts = engine_of(model, NODES, prefill_chunk=chunk, max_running=2), asked(model)
    for _ in range(2):  # the second time with cached prefixes
        sequences = answers(engine, prompts, "draft_model")
        for sequence, prompt in zip(sequences, prompts, strict=True):
            assert sequence.output == greedy("bundled", prompt, TOKENS)
            # A step without a draft writes the first token, and beside a prompt that is read nothing is drafted.
            assert sequence.stats.decode_steps <= 2 + -(-len(sequence.output) // (1 + DEPTH)) + 5 * (chunk < 512)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_head_that_knows_is_always_right(runner: str, tmp_path: Path) -> None:
    """The second time with cached prefixes."""
    engine = engine_of(with_knowing_head(tmp_path, runner), NODES, max_running=2)
    for _ in range(2):
        for sequence, prompt in zip(answers(engine, SHORT_AND_LONG, "head"), SHORT_AND_LONG, strict=True):
            assert sequence.output == generate(permuting_model(), prompt, TOKENS)
            assert sequence.stats.decode_steps <= 2 + -(-TOKENS // (1 + DEPTH))


@pytest.mark.parametrize("runner", ["cuda"])
def test_a_model_drafts_for_itself_on_a_gpu(runner: str) -> None:
    interpret()
    model = drafting_for_itself(taken_over(shallow(), runner=runner))
    engine, prompts, written = engine_of(model, NODES, max_running=2), [(1, 2, 3), tuple(range(40, 60))], 8
    sequences = answers(engine, prompts, "draft_model", tokens=written, nodes=8, depth=3)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == generate(shallow(), prompt, written)
        assert sequence.stats.decode_steps <= 2 + -(-written // 4)


@pytest.mark.parametrize("runner", ["cuda"])
def test_a_head_that_knows_is_always_right_on_a_gpu(runner: str, tmp_path: Path) -> None:
    """In steps of two halves in turn, each of which is in flight while the host reads the features of the other; the
    second time with cached prefixes."""
    engine = engine_of(with_knowing_head(tmp_path, runner), NODES, max_running=2)
    prompts, written = [(1, 2, 3), tuple(range(20))], 8
    patched: Any = engine
    patched._microbatches.microbatch = lambda running: -(-running // 2)
    assert engine.model_drafts["head"]._level_seconds(2) > 0.0, "what a start measures"
    for _ in range(2):
        sequences = answers(engine, prompts, "head", tokens=written, nodes=6, depth=3)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            assert sequence.output == generate(permuting_model(), prompt, written)
            assert sequence.stats.decode_steps <= 2 + -(-written // 4)
    assert sequences[1].stats.cached_prompt_tokens == 16
    assert engine.counts.microbatches > 0
    for made in (engine._runner, engine.model_drafts["head"]._runner):
        assert made._graphs.sizes  # type: ignore[attr-defined]
        assert not made.capture_problem  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "runner"), [("draft_model", "openvino"), *(("head", runner) for runner in RUNNERS)])
def test_drafts_stay_right_after_pauses(name: str, runner: str, tmp_path: Path) -> None:
    """Of three sequences one pauses for every other step at first."""
    model, module, prompts = always_right(name, runner, tmp_path)
    engine = engine_of(model, NODES, max_running=3)
    sequences = added(engine, prompts, name)
    for step in range(12):
        engine.step()
        engine.pause(sequences[step % 3])
        engine.step()
        engine.resume(sequences[step % 3])
        engine.check()
    run(engine)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.output == generate(module, prompt, TOKENS)
        assert sequence.stats.accepted_tokens > sequence.stats.decode_steps


@pytest.mark.parametrize(("name", "runner"), [("draft_model", "openvino"), ("head", "openvino"), ("head", "torch")])
def test_a_model_reads_what_few_sequences_write_and_not_what_many_write(name: str, runner: str, tmp_path: Path) -> None:
    """One sequence drafts until others begin, which are never read, and again as soon as it is alone."""
    model, module, prompts = always_right(name, runner, tmp_path)
    engine = engine_of(model, NODES, max_running=4)
    strategy, drafts = create_beside(engine, name), engine.model_drafts[name]
    vars(drafts)["level_share"] = lambda rows=None: 0.1 if (rows or drafts.shares.rows) < 2 else 9.0
    first, *others = batch_of(prompts, StopParams(90), strategy=strategy, max_draft_nodes=NODES)
    engine.add(first)
    for _ in range(4):
        engine.step()
    assert first.stats.accepted_tokens > 6
    for sequence in others:
        sequence.request = replace(sequence.request, stop=StopParams(8))
        engine.add(sequence)
    engine.step()
    before = first.stats.accepted_tokens
    while engine.running > 1:
        assert [drafts.reads(sequence) for sequence in (first, *others)] == [False] * 3
        engine.step()
        engine.check()
    assert first.stats.accepted_tokens == before
    run(engine)
    assert_no_faults([first, *others])
    assert first.output == generate(module, prompts[0], 90)
    assert first.stats.accepted_tokens > before + 20
    for sequence, prompt in zip(others, prompts[1:], strict=True):
        assert sequence.output == generate(module, prompt, 8)
        assert sequence.stats.accepted_tokens == 0


@pytest.mark.parametrize(("name", "runner"), [("draft_model", "openvino"), ("head", "openvino"), ("head", "torch")])
def test_where_drafts_of_a_model_do_not_pay_it_reads_one_sequence_of_many(
    name: str, runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a tenant's counts follow its text. The others are read again once that pays."""
    monkeypatch.setattr(models_beside, "_READ_ALONE", 3)
    model, module, prompts = always_right(name, runner, tmp_path)
    engine = engine_of(model, NODES, max_running=1)
    strategy, drafts = create_beside(engine, name), engine.model_drafts[name]
    shares = {"chosen by": 9.0, "of a level": 0.1}
    vars(drafts)["level_share"] = lambda rows=None: shares["chosen by" if rows else "of a level"]
    read = list[bool]()
    for prompt in [*prompts, *prompts[:2]]:
        if len(read) == 4:
            shares["chosen by"] = 0.1
        [sequence] = batch_of([prompt], StopParams(TOKENS), strategy=strategy, max_draft_nodes=NODES)
        engine.add(sequence)
        engine.step()
        read.append(drafts.reads(sequence))
        run(engine)
        assert_no_faults([sequence])
        assert sequence.output == generate(module, prompt, TOKENS)
        assert (sequence.stats.accepted_tokens > 0) == read[-1]
    assert read == [False, False, True, False, True]


@pytest.mark.parametrize(("name", "runner"), [("draft_model", "torch"), *(("head", runner) for runner in RUNNERS)])
def test_what_levels_cost_is_measured_at_the_start(name: str, runner: str, tmp_path: Path) -> None:
    """For 1 and 2 rows, on dummy tokens that no draft has anything of."""
    model = (
        with_knowing_head(tmp_path, runner) if name == "head" else drafting_for_itself(taken_over(permuting_model()))
    )
    engine = engine_of(model, NODES, max_running=2, adaptive_budget=True)
    drafts = engine.model_drafts[name]
    assert not drafts._complete.any()
    assert min(drafts.level_share(rows) for rows in (1, 2)) > 0.0
    strategy = create_beside(engine, name)
    for sequence in batch_of(SHORT_AND_LONG, StopParams(TOKENS), strategy=strategy, max_draft_nodes=NODES):
        run(engine, sequence)
        assert sequence.output == generate(permuting_model(), sequence.request.prompt.tolist(), TOKENS)


def test_pages_of_another_tenant_are_not_taken_for_a_cached_prefix() -> None:
    """They were computed for it, then written by a request without drafts, and found by one with drafts."""
    model = drafting_for_itself(served("bundled", "openvino"))
    engine, question = engine_of(model, NODES, max_running=1, kv_cache_tokens=512 + NODES), asked(model)[0]
    first, second = ([tuple(np.resize(question[start:], 300).tolist())] for start in (0, 3))
    answers(engine, first, "draft_model", tenant="a")
    run(engine, *batch_of(second, StopParams(TOKENS), tenant="b"))
    assert engine.model_drafts["draft_model"]._complete.sum() <= (512 + NODES - 300) // 32
    [drafted] = answers(engine, second, "draft_model", tenant="b")
    assert drafted.stats.cached_prompt_tokens > 200
    assert drafted.output == greedy("bundled", second[0], TOKENS)
    assert drafted.stats.decode_steps <= 2 + -(-len(drafted.output) // (1 + DEPTH)), "all that it drafts is right"


@pytest.mark.parametrize("names", [["draft_model"] * 3, ["hybrid"] * 3, ["draft_model", "hybrid", "draft_model"]])
def test_a_step_with_several_tenants_takes_as_many_passes_as_with_one(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, passes, counts = drafting_for_itself(served("bundled", "openvino")), Passes(monkeypatch), []
    prompts = asked(model)
    for tenants in ("aaa", "abc"):
        engine = engine_of(model, NODES)
        made = {pair: create_beside(engine, pair[0]) for pair in zip(names, tenants, strict=True)}
        sequences = [
            make_sequence("r", prompt, StopParams(TOKENS), strategy=made[pair], max_draft_nodes=NODES, tenant=pair[1])
            for prompt, pair in zip(prompts, zip(names, tenants, strict=True), strict=True)
        ]
        passes.count = 0
        run(engine, *sequences)
        counts.append(passes.count)
        assert [s.output for s in sequences] == [greedy("bundled", prompt, TOKENS) for prompt in prompts]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("name", "nodes"), [("none", NODES), ("trie", NODES), ("head", 0), ("hybrid", 0), ("draft_model", 0)]
)
def test_a_model_reads_nothing_of_sequences_that_never_ask_it(
    name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, passes = served_beside("bundled", "openvino"), Passes(monkeypatch)
    head = model.drafters["head"]
    assert head.head is not None
    combined = list[int]()

    def combine(features: Any) -> Any:
        combined.append(len(features))

    parts = head.head._replace(combine=combine)
    model = replace(model, drafters={**model.drafters, "head": head._replace(head=parts)})
    engine, long = engine_of(model, NODES, prefill_chunk=64), tuple(np.resize(asked(model)[0], 300).tolist())
    strategy = create_beside(engine, name)
    run(engine, *batch_of([long], StopParams(9), strategy=strategy, max_draft_nodes=nodes))
    assert (passes.count, combined) == (0, [])
    answers(engine, [long], "draft_model", tokens=9)
    assert passes.count > 0


def test_a_model_reads_no_further_once_drafting_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = drafting_for_itself(served("bundled", "openvino")), Passes(monkeypatch)
    engine = engine_of(model, NODES)
    [sequence] = added(engine, asked(model)[:1], "draft_model")
    monkeypatch.setattr(ModelDrafts, "draft", lambda *asked: 1 / 0)
    while not sequence.stats.drafting_disabled_reason:
        engine.step()
    passes.count = 0
    run(engine)
    assert "ZeroDivisionError" in sequence.stats.drafting_disabled_reason
    assert sequence.output == greedy("bundled", asked(model)[0], TOKENS)
    assert passes.count == 0


@pytest.mark.parametrize("name", ["draft_model", "hybrid"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9, seed=5)])
def test_a_smaller_model_changes_no_token(name: str, sampling: SamplingParams) -> None:
    """The bundled model's first layers."""
    target = served("bundled", "openvino")
    module = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    module.model.layers = module.model.layers[:3]
    module.config.num_hidden_layers = 3
    small = adopt(module, load_tokenizer(BUNDLED_MODEL), name="small", runner="openvino")
    engine = engine_of(replace(target, drafters={"draft_model": model_drafter(small, target, "small")}), NODES)
    stop, strategy = StopParams(TOKENS), create_beside(engine, name)
    sequences = batch_of(asked(target), stop, sampling, strategy=strategy, max_draft_nodes=NODES)
    run(engine, *sequences)
    assert_no_faults(sequences)
    for sequence, prompt in zip(sequences, asked(target), strict=True):
        assert sequence.output == written_by(reference("bundled"), prompt, sampling, stop)
    assert sum(s.stats.draft_tokens for s in sequences) > 0
    assert name != "hybrid" or sequences[0].stats.by_source["draft_model"].verified > 0


SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3,
    logit_bias=((13, 2.0), (300, -100.0)), seed=3,
)  # fmt: skip


@pytest.mark.parametrize("name", MODEL_DRAFTS)
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("depth", [1, 16])
def test_samples_and_stop_strings_are_those_of_drafting_off(name: str, sampling: SamplingParams, depth: int) -> None:
    """Three samples of a prompt, at the least and at the greatest depth."""
    model = served_beside("bundled", "openvino")
    prompt, module = asked(model)[0], reference("bundled")
    seeded = [replace(sampling, seed=sampling.seed + i) for i in range(3)]
    whole = [written_by(module, prompt, one, StopParams(TOKENS)) for one in seeded]
    stop = StopParams(TOKENS, strings=(model.tokenizer.decode(whole[0][20:24]),))

    def written(nodes: int) -> tuple[list[Sequence], list[str]]:
        engine = engine_of(model, NODES)
        strategy = create_beside(engine, name, depth=depth)
        samples = [
            make_sequence(str(i), prompt, stop, one, strategy=strategy, max_draft_nodes=nodes, sample=i)
            for i, one in enumerate(seeded)
        ]
        outputs = run(engine, *samples)
        texts = ["".join("".join(o.texts) for o in outputs if o.sequence is sample) for sample in samples]
        return samples, texts

    plain, drafted = written(0), written(NODES)
    assert [s.output for s in drafted[0]] == [s.output for s in plain[0]]
    assert drafted[1] == plain[1]
    assert [s.output for s in plain[0]] == [tokens[: len(s.output)] for s, tokens in zip(plain[0], whole, strict=True)]
    assert len(plain[0][0].output) < TOKENS, "the stop string ends it"
    assert_no_faults(drafted[0])
    deepest = max(len(s.stats.accepted_by_depth) for s in drafted[0])
    assert name != "draft_model" or sampling.temperature or deepest >= min(depth, 8)
    assert depth > 1 or name == "hybrid" or deepest <= 1


Paths: TypeAlias = dict[tuple[int, ...], float]


def drafted_paths(
    model: LoadedModel, prompts: list[tuple[int, ...]], steps: int, levels: int
) -> list[tuple[list[int], Paths]]:
    """Of each prompt the text after some steps, and what the head drafts then: each path with its probability."""
    engine = engine_of(model, NODES)
    sequences = added(engine, prompts, "head", depth=levels)
    for _ in range(steps):
        engine.step()
    n = len(prompts)
    budgets, depths = np.full((2, n), [[NODES], [levels]], np.int32)
    trees = engine.model_drafts["head"].draft(sequences, budgets, depths, np.zeros(n, np.float32))
    found = []
    for sequence, tree in zip(sequences, trees, strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert max(map(len, paths)) >= 3
        text = [*sequence.request.prompt.tolist(), *sequence.output]
        found.append((text, dict(zip(paths, tree.scores.tolist(), strict=True))))
    engine.check()
    return found


@torch.no_grad()
def path_probability(head: EagleHead, module: Any, text: list[int], path: list[int]) -> float:
    """What a head gives to a path behind a text, entry by entry as the paper has it."""
    hidden = module(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([hidden[layer] for layer in head.feature_layers_of_target], dim=-1)
    read = head.fc(features[:, :-1])
    tokens, total = [*text[1:]], 0.0
    ids = head.token_ids.tolist()
    for token in path:
        embedded = module.get_input_embeddings()(torch.tensor([tokens]))
        output = head(torch.cat([embedded, read], dim=-1), torch.arange(len(tokens))[None])
        total += float(head.logits(output[0, -1:]).log_softmax(-1)[0, ids.index(token)])
        read, tokens = torch.cat([read, output[:, -1:]], dim=1), [*tokens, token]
    return float(np.exp(total))


@pytest.mark.parametrize("runner", ["openvino", "torch", "cuda"])
def test_a_head_drafts_what_it_computes(runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the module itself; weights are not rounded here. With the interpreter a small model, of which the head
    reads the last layer's output as well."""
    monkeypatch.setattr(factory, "quantize_weights", lambda model, bits: None)
    if runner == "cuda":
        folder = head_folder(tmp_path / "head", 256, 64, 64, eagle_aux_hidden_state_layer_ids=[0, 2, 1])
        model, head = with_head(folder, runner, shallow())
        found = drafted_paths(model, [(1, 2, 3), tuple(range(40, 60))], steps=2, levels=3)
        module = shallow()
    else:
        model, head = with_head(head_folder(tmp_path / "head", 4096), runner)
        found = drafted_paths(model, asked(model), steps=12, levels=4)
        module = reference("bundled")
    for text, paths in found:
        written = [*paths]
        for path in (written[0], written[len(paths) // 2], written[-1]):
            expected = path_probability(head, module, text, [*path])
            assert paths[path] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ["head", "hybrid"])
def test_a_head_changes_no_token(name: str, runner: str, tmp_path: Path) -> None:
    model, _ = with_head(head_folder(tmp_path / "head", 4096), runner)
    prompts = asked(model)
    for _ in range(2):
        drafted = answers(engine_of(model, NODES, prefill_chunk=16), prompts, name)
        assert [s.output for s in drafted] == [greedy("bundled", prompt, TOKENS) for prompt in prompts]
        assert sum(s.stats.draft_tokens for s in drafted) > 0


@pytest.mark.parametrize("runner", RUNNERS[:2])
def test_a_head_without_the_features_of_a_cached_prefix_attends_to_what_follows(runner: str, tmp_path: Path) -> None:
    """Another strategy computed the prefix, so that nobody told the head of it."""
    model, _ = with_head(head_folder(tmp_path / "head", 4096), runner)
    long = [tuple(np.resize(asked(model)[0], 150).tolist())]
    engine = engine_of(model, NODES)
    answers(engine, long, "trie")
    [drafted] = answers(engine, long, "head")
    assert drafted.stats.cached_prompt_tokens > 100
    assert drafted.output == greedy("bundled", long[0], TOKENS)


@pytest.mark.parametrize("runner", [*RUNNERS, "cuda"])
def test_features_are_the_inputs_of_layers(runner: str) -> None:
    """Of all tokens of a step, in the order asked for; the number of layers stands for what the output head reads."""
    tokens, layers = np.arange(3, 24, dtype=np.int32), (2, 0, 1, 0)
    computing = taken_over(shallow(), feature_layers=layers, **runner_options(runner)).factory.runner(64)
    row = BatchRow(np.array([1, 0], np.int32), 0, tokens, EMPTY_TREE, logits_from=20)
    with torch.no_grad():
        hidden = shallow()(torch.from_numpy(tokens)[None].long(), output_hidden_states=True).hidden_states
    batch = lay_out([row])
    shown = computing.step(batch, 0).features
    assert shown.dtype == np.float32
    np.testing.assert_allclose(shown, torch.cat([hidden[n][0] for n in layers], -1), rtol=1e-4, atol=1e-4)
    if runner != "openvino":  # it computes them anyway
        assert computing.step(replace(batch, reads_features=False), 0).features is None


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"draft_vocab_size": None}, "must name draft_vocab_size"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({}, "its tokens are not among the 1,000 of the model"),
    ],
)
def test_a_head_that_cannot_be_computed_is_refused(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    """`loading/test_draft_models` has those of another model."""
    folder = head_folder(tmp_path / "head", 4096)
    config = LlamaConfig.from_pretrained(folder)
    vars(config).update(changed)
    config.to_json_file(Path(folder) / "config.json")
    with pytest.raises(InvalidValueError, match="draft_head") as refused:
        load_head(folder, 256, 6, 4096 if changed else 1000)
    assert problem in str(refused.value)


def test_a_draft_model_with_recurrent_layers_is_refused() -> None:
    """Its states would have to go back with each draft that is not accepted."""
    target, recurrent = served("llama"), taken_over(tiny_hybrid("qwen3_next"))
    beside = {"draft_model": DraftModel("small", recurrent.factory, None, recurrent.parameters)}
    with pytest.raises(InvalidValueError, match="draft_model: 'small' is not allowed; it must be a model of attention"):
        engine_of(replace(target, drafters=beside), NODES)


def test_steps_without_a_head_read_no_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = with_head(write_knowing_head(tmp_path / "head"), "torch", permuting_model())
    engine, read = engine_of(model, NODES), list[bool]()
    begin = engine._runner.begin

    def noted(batch: StepBatch, *arguments: Any) -> StepInFlight:
        read.append(batch.reads_features)
        return begin(batch, *arguments)

    monkeypatch.setattr(engine._runner, "begin", noted)
    for name in ("trie", "head"):
        read.clear()
        answers(engine, [(1, 2, 3)], name)
        assert {*read} == {name == "head"}


def test_features_are_combined_many_at_a_time_while_a_head_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = with_head(write_knowing_head(tmp_path / "head"), "torch", permuting_model())
    drafter, sizes = model.drafters["head"], list[int]()
    assert drafter.head is not None
    combine = drafter.head.combine

    def noted(features: SequenceOf[Any]) -> Float32Array:
        sizes.append(sum(map(len, features)))
        return combine(features)

    parts = drafter.head._replace(combine=noted)
    engine = engine_of(replace(model, drafters={"head": drafter._replace(head=parts)}), NODES)
    answers(engine, [(1, 2, 3)], "head")
    assert 0 < min(sizes[1:]) < 32
    sizes.clear()
    never = np.zeros(1, np.int32), np.zeros(1, np.float32)
    monkeypatch.setattr(LevelGains, "worthwhile", lambda gains, bins, promised, share: never)
    monkeypatch.setattr(LevelGains, "gain", lambda gains, share: 1.0)
    answers(engine, [(1, 2, 3)], "head")
    assert sizes == [32] * (TOKENS // 32)
