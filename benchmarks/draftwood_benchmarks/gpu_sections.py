"""The parts of `bench gpu`: each measures one thing, and raises BenchmarkError at the first that is wrong."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from draftwood_benchmarks.harness.answers import Task, finish, generate, sequences, step
from draftwood_benchmarks.harness.models import ChosenModel
from draftwood_benchmarks.harness.prompts import encode
from draftwood_benchmarks.harness.report import BenchmarkError, Rows
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.runner import CudaRunner
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.built_in import RecyclingOptions, TrieOptions
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.calls import VerifiedTrees
from draftwood_strategies.device.mixture import DeviceMixture
from draftwood_strategies.device.strategy import drafts_on_device
from draftwood_strategies.device.trie import DeviceDrafts, DeviceTrie
from draftwood_strategies.draft import EMPTY_TREE, DraftTree
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.successors import WIDTH
from draftwood_strategies.trie.phrase_index import LEAST_TOKENS

_LEARNED_AT_ONCE = 64
"""Answers that a memory learns from, so that few streams need not write them one after another."""
_REPEATS = 10
"""Of attention in a CUDA graph, so that its launches take no time of the host."""
_PHRASE, _ANSWER, _CONTEXT = 32, 256, 1024
"""Tokens of a phrase, of an answer in a memory and of a prompt, and of a text that a row has space for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        nodes, contexts: of the steps whose time is taken.
        streams: sequences that decode at once.
        tokens: new tokens of an answer.
        prompts: questions at least, in each pass.
        others: questions that a memory learned from before the warm pass.
        memory_tokens: of the memory that the device's drafts are from.
        answer_context: tokens of a question and its answer, at most.
        rounds: of each measurement, of which the median counts.
        adaptive: measure step times first, which decide how much is drafted.
        draft_nodes: of a draft, at most.
        steps_ahead: as of `EngineConfig`.
    """

    nodes: tuple[int, ...] = (0, 1, 3, 7, 15, 31, 63, 127, 255)
    contexts: tuple[int, ...] = (512, 2048, 8192, 32_768, 131_072)
    streams: tuple[int, ...] = (1, 8, 32, 64, 256)
    strategies: tuple[str, ...] = ("trie", "recycling", "hybrid")
    tokens: int = 128
    prompts: int = 8
    others: int = 0
    memory_tokens: int = 1_000_000
    answer_context: int = 256
    rounds: int = 10
    adaptive: bool = True
    draft_nodes: int = 64
    steps_ahead: bool = False

    @property
    def step_tokens(self) -> int:
        """Room for a step's tokens after its context."""
        return max(self.nodes) + 64


SMOKE = Plan(
    (0, 3), (32,), (2,), ("hybrid",), tokens=4, prompts=1, memory_tokens=2048, rounds=1, adaptive=False, draft_nodes=3
)
"""The least of everything: shows that the program runs, on any machine."""


def correctness(chosen: ChosenModel, questions: list[str], plan: Plan) -> Rows:
    """Greedy answers with drafts against transformers' own `generate`, in float32."""
    rows, model = [], chosen.load()
    module = chosen.load_plain(model)
    prompts = [encode(model.tokenizer, question) for question in questions[: plan.prompts]]
    answers = [_generated(module, prompt, plan.tokens) for prompt in prompts]
    for name in ("none", *plan.strategies):
        engine = _engine(model, 1, plan, adaptive=False)
        strategy, accepted = create(name), 0
        for question, prompt, expected in zip(questions[: plan.prompts], prompts, answers, strict=True):
            [sequence] = _run(engine, [prompt], strategy, plan.tokens)
            if sequence.output != expected:
                raise BenchmarkError(f"{name}: the answer to {question!r} is not that of transformers")
            accepted += sequence.stats.accepted_tokens
        rows.append({"strategy": name, "answers": len(prompts), "accepted": accepted})
    return rows


def step_times(model: LoadedModel, plan: Plan, weight_bytes: int, bandwidth: float) -> Rows:
    """The time of a step by the size of its draft tree and its context, beside the floor of the bytes that it reads; of
    the plan's contexts those that memory and the model hold."""
    more = plan.step_tokens
    affordable = min(model.factory.default_kv_tokens(more, 2**20), model.max_context)
    contexts = [context for context in plan.contexts if context + more <= affordable]
    if not contexts:
        raise BenchmarkError(f"a context of {min(plan.contexts)} tokens does not fit; at most {affordable - more} do")
    runner = model.factory.runner(max(contexts) + more)
    random, rows = np.random.default_rng(0), []
    for context in contexts:
        for nodes in plan.nodes:
            batch = _tree_after(context, nodes, model, runner, random)
            seconds = median_seconds(lambda: runner.step(batch, 0), plan.rounds)  # noqa: B023
            floor = (weight_bytes + context * model.factory.kv_bytes_per_token) / bandwidth
            rows.append({"context": context, "tokens": 1 + nodes, "ms": 1e3 * seconds, "floor_ms": 1e3 * floor})
    if isinstance(runner, CudaRunner) and (reason := runner.capture_problem):
        raise BenchmarkError(f"steps are not replayed as CUDA graphs: {reason}")
    return rows


def _tree_after(context: int, nodes: int, model: LoadedModel, runner: Any, random: np.random.Generator) -> StepBatch:
    """A step of one token and a draft tree under it, after so many tokens."""
    tree = random_tree(random, nodes, deep=0.6)
    tree = DraftTree.of(tree.tokens % model.vocab_size, tree.parents)
    pages = np.arange(runner.pages, dtype=np.int32)
    return lay_out([BatchRow(pages, context, np.zeros(1, np.int32), tree, 0)])


def random_tree(random: np.random.Generator, nodes: int, deep: float) -> DraftTree:
    """`deep`: how likely a node hangs from the one before it."""
    if not nodes:
        return EMPTY_TREE
    parents = [i - 1 if random.random() < deep else int(random.integers(-1, i)) for i in range(nodes)]
    return DraftTree.of([*range(nodes)], parents)


def draft_times(device: torch.device, plan: Plan) -> Rows:
    """The trie's drafts on the device, from a memory of phrases that recur, and what it learns from 4 tokens a row; and
    what mixing them with a successor table adds to both, with predictions of such text at each node."""
    random = np.random.default_rng(0)
    phrases = random.integers(0, 32_000, (2_000, _PHRASE)).astype(np.int32)

    def text(tokens: int) -> Int32Array:
        chosen = phrases[random.integers(0, phrases.shape[0], -(-tokens // _PHRASE))]
        return np.asarray(chosen.reshape(-1)[:tokens])

    most = max(plan.streams)
    sizes = DeviceSizes(most, _CONTEXT, 1, plan.memory_tokens, contexts=RecyclingOptions.capacity_contexts)
    trie = DeviceTrie(sizes, device)
    mixture = DeviceMixture(trie)
    trie.import_runs("drafts", [text(_ANSWER) for _ in range(plan.memory_tokens // (_ANSWER + 16))])
    numbers = torch.arange(most + 1, dtype=torch.int32, device=device)
    for number in range(most):
        trie.begin(number, "drafts")
    prompts = torch.from_numpy(np.concatenate([text(_ANSWER) for _ in range(most)])).to(device)
    trie.append_prompts(numbers[:most], prompts, numbers * _ANSWER)
    trie.begin_outputs(numbers[:most])
    rows: Rows = []

    def timed(*calls: Callable[[], object]) -> float:
        """Microseconds."""
        run = _replayed(lambda: [call() for call in calls], device)
        return 1e6 * median_seconds(run, plan.rounds, device) / _REPEATS

    for streams in plan.streams:
        for nodes in (16, 64):
            tokens, parents = torch.zeros((2, streams, nodes), dtype=torch.int32, device=device)
            counts, budgets = torch.full((2, streams), nodes, dtype=torch.int32, device=device)
            out = DeviceDrafts(tokens, parents, torch.zeros((streams, nodes), device=device), counts)
            asked, accepted = numbers[:streams], torch.full((streams,), 4, dtype=torch.int32, device=device)
            written = torch.from_numpy(text(4 * streams).reshape(streams, 4)).to(device)
            verified = _chains([text(1 + nodes + WIDTH) for _ in range(streams)], device)
            mix = partial(mixture.propose, asked, budgets, out)
            learn_mixed = partial(mixture.learn, asked, written, accepted, asked, verified)
            row = {"streams": streams, "nodes": nodes, "us": timed(partial(trie.propose, asked, budgets, out))}
            row["drafted"] = float(counts.float().mean())
            row["mix_us"] = timed(mix)
            row["mix_learn_us"] = timed(mix, learn_mixed) - row["mix_us"]
            row["learn_us"] = timed(partial(trie.learn, asked, written, accepted))
            rows.append(row)
    return rows


def _chains(texts: list[Int32Array], device: torch.device) -> VerifiedTrees:
    """Verified texts, whose next tokens are the most probable ones at each node."""
    windows = np.stack([np.lib.stride_tricks.sliding_window_view(text, WIDTH)[1:] for text in texts])
    rows, nodes, _ = windows.shape
    parents = np.arange(-1, rows * nodes - 1, dtype=np.int32)
    parents[::nodes] = -1
    tokens = np.concatenate([text[:nodes] for text in texts])
    offsets = np.arange(rows + 1, dtype=np.int32) * nodes
    arrays = tokens, parents, np.ascontiguousarray(windows.reshape(-1, WIDTH)), offsets.astype(np.int32)
    return VerifiedTrees(*(torch.from_numpy(array).to(device) for array in arrays))


def _replayed(run: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Runs it `_REPEATS` times: on a GPU as one graph."""

    def repeated() -> None:
        for _ in range(_REPEATS):
            run()

    if device.type == "cpu":
        return repeated
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        repeated()
    return graph.replay


def streams_ahead(model: LoadedModel, questions: list[str], plan: Plan) -> Rows:
    """As `streams`, of steps that begin while the one before is in flight, without drafts and with those that the
    device makes."""
    context = min(model.max_context, plan.answer_context)
    sizes = DeviceSizes(
        rows=max(_LEARNED_AT_ONCE, *plan.streams),
        row_tokens=max(context, LEAST_TOKENS),
        tenants=4,
        tenant_tokens=min(plan.memory_tokens, TrieOptions.capacity_tokens),
        contexts=RecyclingOptions.capacity_contexts,
    )
    with drafts_on_device(sizes, model.device) as arena:
        if arena is None:
            raise BenchmarkError("the device does not draft; the reason was logged")
        return streams(model, questions, replace(plan, strategies=("trie", "hybrid"), steps_ahead=True))


def streams(model: LoadedModel, questions: list[str], plan: Plan) -> Rows:
    """Tokens a second, acceptance length, the share of a step that the device waits for the host, and the shares of
    steps in halves and of those that begin ahead: by strategy and by the number of sequences that decode at once.

    Each strategy answers questions with an empty memory (cold), learns from others, answers further ones (warm), and
    answers these once more (again). The ratio is over drafting off on the same questions. If there are too few
    questions, they come again within a pass, and the warm pass is left out.
    """
    prompts, rows = [encode(model.tokenizer, question) for question in questions], []
    teacher = _engine(model, _LEARNED_AT_ONCE, plan, plan.adaptive) if plan.others else None
    for count in plan.streams:
        asked, others, further = parts_of(prompts, max(2 * count, plan.prompts), plan.others)
        engine = None  # gives its memory back before the next one takes its own
        engine = _engine(model, count, plan, plan.adaptive)
        off: dict[str, float] = {}
        for name in ("none", *plan.strategies):
            strategy = create(name)
            _run(engine, asked[:1], create(name), plan.tokens)  # compiles what it calls
            for memory, passed in (("cold", asked), ("warm", further), ("again", further or asked)):
                if not passed or (name == "none" and memory == "again"):
                    continue
                if memory == "warm" and teacher is not None:
                    _run(teacher, others, strategy, plan.tokens)
                row = _while_full(engine, count, _asked(engine, passed, strategy, plan.tokens))
                if name == "none":
                    off[memory] = off["again"] = row["tokens_per_s"]
                over_off = row["tokens_per_s"] / off[memory]
                rows.append({"streams": count, "strategy": name, "memory": memory, "over_off": over_off} | row)
    return rows


def parts_of(
    prompts: list[Int32Array], size: int, others: int
) -> tuple[list[Int32Array], list[Int32Array], list[Int32Array]]:
    """Questions of the first pass, those that are learned, and those of the second pass; the last two are empty where
    there are too few questions, and those of the first pass may then be repeated."""
    if not others or len(prompts) < 2 * size + others:
        return [prompts[i % len(prompts)] for i in range(size)], [], []
    return prompts[:size], prompts[size : size + others], prompts[size + others : 2 * size + others]


def _while_full(engine: Engine, count: int, running: list[Sequence]) -> dict[str, float]:
    """Runs sequences to their ends. What they did as long as `count` of them ran, or others waited: the slowest answers
    would be left alone at the end."""
    for sequence in running:
        engine.add(sequence)
    before, began = engine.counts, time.perf_counter()
    while engine.waiting or engine.running == count:
        step(engine)
    seconds, after = time.perf_counter() - began, engine.counts
    tokens = sum(len(sequence.output) for sequence in running)
    decode_steps = sum(sequence.stats.decode_steps for sequence in running)
    drafted = sum(sequence.stats.draft_tokens for sequence in running)
    finish(engine, [])
    steps, step_seconds = after.steps - before.steps, after.step_seconds - before.step_seconds
    host_seconds = step_seconds - (after.model_seconds - before.model_seconds)
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_step": tokens / decode_steps,
        "drafted_per_step": drafted / steps,
        "ms_per_step": 1e3 * step_seconds / steps,
        "host_us_per_step": 1e6 * host_seconds / steps,
        "host_share": host_seconds / step_seconds,
        "microbatches": (after.microbatches - before.microbatches) / steps,
        "steps_ahead": (after.steps_ahead - before.steps_ahead) / steps,
    }


def transformers_speed(module: Any, model: LoadedModel, questions: list[str], plan: Plan) -> Rows:
    """Tokens a second of transformers' own `generate`, one answer at a time.

    Args:
        module: the model as transformers runs it.
    """
    prompts = [encode(model.tokenizer, question) for question in questions[: plan.prompts]]
    _generated(module, prompts[0], plan.tokens)
    began = time.perf_counter()
    tokens = sum(len(_generated(module, prompt, plan.tokens)) for prompt in prompts)
    return [{"tokens_per_s": tokens / (time.perf_counter() - began)}]


def _generated(module: Any, prompt: Int32Array, tokens: int) -> list[int]:
    """Exactly so many tokens that transformers writes after a prompt."""
    return generate(module, [prompt], tokens, min_new_tokens=tokens, eos_token_id=None)[0]


def _engine(model: LoadedModel, count: int, plan: Plan, adaptive: bool) -> Engine:
    """For `count` questions and their answers, however long the contexts of the model are."""
    context = min(model.max_context, plan.answer_context)
    model = replace(model, max_context=context)
    config = EngineConfig(
        max_running=count,
        max_draft_nodes=plan.draft_nodes,
        adaptive_budget=adaptive,
        kv_cache_tokens=(count + 1) * (context + 64),
        steps_ahead=plan.steps_ahead,
    )
    return Engine(model, config)


def _asked(engine: Engine, prompts: list[Int32Array], strategy: Any, tokens: int) -> list[Sequence]:
    drafting = Drafting(max_nodes=engine.config.max_draft_nodes)
    return sequences(prompts, Task(tokens, ignore_eos=True), strategy, drafting=drafting)


def _run(engine: Engine, prompts: list[Int32Array], strategy: Any, tokens: int) -> list[Sequence]:
    running = _asked(engine, prompts, strategy, tokens)
    finish(engine, running)
    return running


def median_seconds(run: Callable[[], object], rounds: int, device: torch.device | None = None) -> float:
    """Of a function that only launches, with the device to wait for."""
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        run()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
