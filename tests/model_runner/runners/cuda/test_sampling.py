"""Tokens chosen by the kernels are those that the host chooses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from draftwood_benchmarks.gpu_sections import random_tree
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.base import KVShape
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.memory import PAGE_SIZE, KVPages, StepArrays
from draftwood_model_runner.runners.cuda.sampling import Logprobs, log_probabilities, sample_and_accept
from draftwood_model_runner.runners.cuda.tiling import Division, divide
from draftwood_model_runner.sampling.metadata import MOST_PROBABLE, NOT_SAMPLED, ON_HOST, SamplingMetadata
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.draft import EMPTY_TREE, DraftTree
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.sequences import make_sequence

VOCAB = 300
EOS = frozenset({3, 4})

sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 250, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.4, 0.001]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.8]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([(), ((7, 3.0), (290, -100.0), (7, 1.0))]),
    seed=st.sampled_from([0, 2**64 - 1, 12345]),
)


class Written:
    """A sequence with some output, and what the host does with it."""

    def __init__(
        self, params: SamplingParams, seed: int, min_tokens: int = 0, grammar: RandomGrammar | None = None
    ) -> None:
        random = np.random.default_rng(seed)
        self.prompt = random.integers(0, 30, 9).astype(np.int32)
        self.output: list[int] = random.integers(5, 30, 6).tolist()
        self._params, self._stop, self._grammar = params, StopParams(100, min_tokens=min_tokens), grammar

    def sampler(self, path: list[int]) -> TokenSampler:
        grammar = None if self._grammar is None else self._grammar.copy()
        sequence = make_sequence("a", self.prompt, self._stop, self._params, grammar=grammar)
        sampler = TokenSampler(sequence, EOS, VOCAB)
        for token in [*self.output, *path]:
            sampler.accept(token)
        return sampler

    @property
    def context(self) -> int:
        return self.prompt.size + len(self.output) - 1


def paths(tree: DraftTree) -> list[list[int]]:
    """The tokens from the root down to each node, the root before them."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


def sampled_by_kernels(
    batch: list[tuple[Written, DraftTree]], logits: torch.Tensor, kinds: list[int | None]
) -> tuple[Int32Array, KVPages, KVPages]:
    """The tokens after each node, and KV memory before and after; `kinds` replace the rules of a row."""
    rows, rules, table = [], [], 0
    for (written, tree), kind in zip(batch, kinds, strict=True):
        pages = -(-(written.context + 1 + len(tree)) // PAGE_SIZE)
        chain = np.array(written.output[-1:], np.int32)
        rows.append(
            BatchRow(np.arange(table, table + pages, dtype=np.int32)[::-1].copy(), written.context, chain, tree, 0)
        )
        table += pages
        nodes, parents = np.append(chain, tree.tokens), np.append(np.int32(-1), tree.parents + np.int32(1))
        rules.append(written.sampler([]).sampling(nodes, parents) if kind is None else kind)
    step = lay_out(rows)
    shape = KVShape(2, 16, 16)
    before, after = (KVPages((shape, shape), torch.float32, DEVICE, table * PAGE_SIZE) for _ in range(2))
    for kv in (before, after):
        for layer in kv.layers.values():
            layer.copy_(torch.arange(layer.numel(), device=DEVICE).view(layer.shape))
    tiles = divide(step, Division(8, 1))
    arrays = StepArrays(step.size, tiles.ancestor_bitmask.shape[1], tiles.parts.shape[0], step.block_table.size, DEVICE)
    metadata = SamplingMetadata.of(rules)
    arrays.fill(step, tiles, step.size, metadata)
    sampled = torch.stack([torch.zeros(step.size), logits.argmax(1)], 1).to(DEVICE, torch.int32)
    sample_and_accept(logits.to(DEVICE), sampled, arrays, metadata, after)
    assert not sampled[:, 0].any()
    return sampled[:, 1].cpu().numpy(), before, after


def made_up_logits(random: np.random.Generator, rows: int, coarse: bool) -> torch.Tensor:
    """`coarse`: of bfloat16, and some 20 tokens share a score, both zeros among them."""
    logits = torch.from_numpy(random.standard_normal((rows, VOCAB)) * 3).float()
    return torch.round(logits * 2).bfloat16() / 2 if coarse else logits


@given(params=sampling, seed=st.integers(0, 2**16), coarse=st.booleans(), min_tokens=st.sampled_from([0, 8]))
@settings(max_examples=14, derandomize=True, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
def test_as_on_the_host_at_every_node(params: SamplingParams, seed: int, coarse: bool, min_tokens: int) -> None:
    """With coarse logits many are equal, and a threshold lies among them."""
    random = np.random.default_rng(seed)
    tree = random_tree(random, 5, 0.6)
    tree = DraftTree.of((tree.tokens + 5) % 12, tree.parents)
    written = Written(params, seed, min_tokens)
    logits = made_up_logits(random, 6, coarse)
    sampled, _, _ = sampled_by_kernels([(written, tree)], logits, [None])
    for node, path in enumerate(paths(tree)):
        expected = written.sampler(path).sample(logits[node], [int(logits[node].argmax())])
        assert sampled[node] == expected, (node, path)


@given(
    params=sampling.filter(lambda params: params.top_p < 1.0 if params.temperature else bool(params.logit_bias)),
    seed=st.integers(0, 2**16),
    nodes=st.sampled_from([0, 2, 6]),
    known=st.sampled_from([0, 1, 3, 1_000]),
)
@settings(max_examples=18, derandomize=True, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
def test_neither_the_draft_nor_the_clock_chooses(params: SamplingParams, seed: int, nodes: int, known: int) -> None:
    """The device chooses what a grammar allows where there was time for a mask, the host elsewhere. Beside a sequence
    without a grammar."""
    random = np.random.default_rng(seed)
    written, free = Written(params, seed, grammar=RandomGrammar(VOCAB, 0.6, known)), Written(params, seed + 1)
    tree = random_tree(random, nodes, 0.6)
    logits = made_up_logits(random, 3 + nodes, coarse=True)
    sampled, _, _ = sampled_by_kernels([(free, DraftTree.of([8], [-1])), (written, tree)], logits, [None, None])
    assert sampled[0] == free.sampler([]).sample(logits[0], [int(logits[0].argmax())])
    for node, path in enumerate(paths(tree)):
        expected = written.sampler(path).sample(logits[2 + node], [int(logits[2 + node].argmax())])
        assert sampled[2 + node] == (expected if node < known else NOT_SAMPLED), (node, path)


def test_choices_with_masks_can_be_sent_to_other_processes() -> None:
    written = Written(SamplingParams(temperature=1.0, seed=1), 1, grammar=RandomGrammar(VOCAB))
    nodes, parents = np.array([1, 2], np.int32), np.array([-1, 0], np.int32)
    metadata = SamplingMetadata.of([written.sampler([]).sampling(nodes, parents), MOST_PROBABLE])
    (rule,) = pickle.loads(pickle.dumps(metadata.with_masks())).sequences
    (expected,) = metadata.sequences
    assert callable(expected.masks)
    assert (rule.masks.bits == expected.masks().bits).all()
    assert rule.masks.rows.tolist() == [0, 1]


def test_log_probabilities() -> None:
    """For those sequences that report some, as on the host; a prompt that is read has no row."""
    random = np.random.default_rng(6)
    rows = [BatchRow(np.arange(2, dtype=np.int32), 3, np.zeros(4, np.int32), EMPTY_TREE, 4)]
    rows += [
        BatchRow(np.arange(2, dtype=np.int32), 3, np.zeros(1, np.int32), random_tree(random, n, 0.5), 0)
        for n in (2, 1, 3)
    ]
    step = lay_out(rows)
    tiles = divide(step, Division(8, 1))
    arrays = StepArrays(step.size, tiles.ancestor_bitmask.shape[1], tiles.parts.shape[0], step.block_table.size, DEVICE)
    metadata = SamplingMetadata.of([ON_HOST, MOST_PROBABLE, MOST_PROBABLE, MOST_PROBABLE], [None, 2, None, 0])
    arrays.fill(step, tiles, step.size, metadata)
    logits = made_up_logits(random, 9, coarse=False)
    sampled = torch.from_numpy(random.integers(0, VOCAB, 9).astype(np.int32))
    logprobs = log_probabilities(logits.to(DEVICE), sampled.to(DEVICE), arrays, metadata)
    assert logprobs is not None
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    for row, count in ((0, 2), (1, 2), (2, 2), (5, 0), (6, 0), (7, 0), (8, 0)):
        written = Written(SamplingParams(logprobs=count), 1).sampler([]).logprobs(logits[row], int(sampled[row]))
        ours = Logprobs(*(part.cpu().numpy() for part in logprobs)).at(row, count)
        assert ours.top_token_ids == written.top_token_ids
        assert [ours.logprob, *ours.top_logprobs] == pytest.approx([written.logprob, *written.top_logprobs], rel=1e-5)
    nobody = metadata._replace(logprobs=np.full(4, -1, np.int32))
    assert log_probabilities(logits.to(DEVICE), sampled.to(DEVICE), arrays, nobody) is None


@pytest.mark.parametrize("kind", [MOST_PROBABLE, ON_HOST])
def test_keys_and_values_of_the_accepted_path(kind: int) -> None:
    """They move behind the committed ones, in both layers, unless the host chooses."""
    tree, path = DraftTree.of([5, 6, 7, 8, 9], [-1, -1, 1, 2, 2]), [1, 2, 4]
    batch = [(Written(SamplingParams(), i), tree) for i in range(3)]
    logits = made_up_logits(np.random.default_rng(2), 6, coarse=False)
    for parent, node in zip([-1, *path], path, strict=False):
        logits[1 + parent, tree.tokens[node]] = 99.0
    _, before, after = sampled_by_kernels(batch, logits.repeat(3, 1), [kind] * 3)
    context = batch[0][0].context
    pages = -(-(context + 1 + len(tree)) // PAGE_SIZE)
    moved = [1 + node for node in path] if kind == MOST_PROBABLE else [1, 2, 3]
    sources = [*range(context + 1), *(context + at for at in moved)]
    for old, new in zip(before.layers.values(), after.layers.values(), strict=True):
        for row in range(3):
            order = np.arange(row * pages, (row + 1) * pages)[::-1].tolist()
            for entry, source in enumerate(sources):
                actual = new[order[entry // PAGE_SIZE], :, entry % PAGE_SIZE]
                assert torch.equal(actual, old[order[source // PAGE_SIZE], :, source % PAGE_SIZE])
