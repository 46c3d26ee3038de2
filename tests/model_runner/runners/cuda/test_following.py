"""Steps that begin while the one before is in flight: laid out by the device as the host would have, and with the
tokens of transformers' own `generate`, whether the device drafts for them or nobody does."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from draftwood_benchmarks.gpu_sections import random_tree
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.base import Following, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.following import Followed
from draftwood_model_runner.runners.cuda.memory import PAGE_SIZE, StepArrays
from draftwood_model_runner.runners.cuda.sampling import Written
from draftwood_model_runner.runners.cuda.tiling import Division, divide
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import DraftTree, create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.strategy import DeviceStrategy, drafts_on_device
from draftwood_strategies.device.trie import DeviceDrafts
from draftwood_strategies.draft_engine import guard
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.test_lossless import NEW_TOKENS, PROMPTS, served, written
from tests.model_runner.sequences import GREEDY, engine_of, make_sequence, run
from tests.strategies.fakes import Clock

NODES = 12
WORDS, MOST_PARTS, MOST_PAGES = 4, 400, 100


class Row(NamedTuple):
    """What a row is once the step in flight has ended: its pages, committed tokens, last token and draft.

    Attributes:
        longest: committed tokens that the host expects at most.
        most: nodes of its draft that the host expects at most.
    """

    pages: Int32Array
    context: int
    root: int
    tree: DraftTree
    longest: int
    most: int


def random_rows(random: np.random.Generator, count: int, most_nodes: int) -> list[Row]:
    rows, pages = [], random.permutation(MOST_PAGES).astype(np.int32)
    for own in np.split(pages, count):
        nodes = int(random.integers(0, most_nodes + 1))
        tree = DraftTree.of(random.permutation(500)[:nodes], random_tree(random, nodes, 0.5).parents)
        most = nodes + int(random.integers(0, 3))
        longest = min(int(random.integers(0, 200)), own.size * PAGE_SIZE - most - 2)
        context = max(0, longest - int(random.integers(0, 9)))
        rows.append(Row(own, context, int(random.integers(0, 50)), tree, longest, most))
    return rows


def filled(batch: StepBatch, division: Division) -> StepArrays:
    arrays = StepArrays(batch.size, WORDS, MOST_PARTS, batch.block_table.size, DEVICE)
    arrays.fill(batch, divide(batch, division), batch.size)
    return arrays


def followed(rows: list[Row], random: np.random.Generator, division: Division) -> tuple[StepArrays, StepBatch]:
    """As the device lays the rows out, which are in another order in the step in flight."""
    count, sizes = len(rows), np.array([1 + row.most for row in rows], np.int32)
    contexts, size = np.array([row.longest for row in rows], np.int32), int(sizes.sum())
    batch = StepBatch(
        tokens=np.zeros(size, np.int32),
        positions=np.repeat(contexts, sizes),
        parents=np.full(size, -1, np.int32),
        cu_seqlens=np.cumsum([0, *sizes], dtype=np.int32),
        context_lens=contexts,
        block_table=np.concatenate([row.pages for row in rows]),
        cu_blocks=np.cumsum([0, *(row.pages.size for row in rows)], dtype=np.int32),
        logit_rows=np.arange(size, dtype=np.int32),
    )
    arrays, sources = filled(batch, division), random.permutation(count).astype(np.int32)
    nodes = np.array([len(row.tree) for row in rows])
    drafted = np.where(nodes > 0, np.cumsum(nodes > 0) - 1, -1).astype(np.int32)
    tokens, counts, ends = torch.zeros((count, 16), dtype=torch.int32), *torch.zeros((2, count)).int()
    draft_tokens, draft_parents = torch.zeros((2, count, int(sizes.max()) + 2), dtype=torch.int32)
    draft_counts = torch.zeros(count, dtype=torch.int32)
    for row, source, number in zip(rows, sources, drafted, strict=True):
        counts[source] = accepted = int(random.integers(0, 16))
        tokens[source, accepted], ends[source] = row.root, row.context
        if number >= 0:
            draft_counts[number] = len(row.tree)
            draft_tokens[number, : len(row.tree)] = torch.from_numpy(row.tree.tokens)
            draft_parents[number, : len(row.tree)] = torch.from_numpy(row.tree.parents)
    trees = DeviceDrafts(draft_tokens.to(DEVICE), draft_parents.to(DEVICE), draft_tokens, draft_counts.to(DEVICE))
    in_flight = Written(*(part.to(DEVICE) for part in (tokens, counts, ends)), *[tokens] * 4)
    host = Followed(in_flight, Following(sources, drafted, None)).fill(arrays, batch, trees if nodes.any() else None)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host.tokens, arrays.tokens.cpu())
    assert torch.equal(host.parents, arrays.parents.cpu())
    return arrays, batch


def layouts(arrays: StepArrays, begin: int, count: int, most_sees: int) -> list[tuple[int, int, int, int, set[int]]]:
    """Of a row's first tokens: token, position, slot, parent counted from the first one, and the entries of the row
    that it attends to."""
    found = []
    for token in range(begin, begin + count):
        first, parts = arrays.token_parts[token, :2].tolist()
        of_tile = arrays.parts[first : first + parts].tolist()
        read = {entry for part in of_tile for entry in range(part[3], min(part[4], int(arrays.prefixes[token])))}
        words, nodes = arrays.ancestor_bitmask[token].tolist(), range(of_tile[-1][5], of_tile[-1][6])
        read |= {entry for i, entry in enumerate(nodes) if words[i // 64] >> (i % 64) & 1}
        assert all(part[5] + part[7] >= begin for part in of_tile)
        assert not any(entry >= most_sees for entry in read)
        assert {entry + of_tile[-1][7] for entry in nodes} <= {*range(begin, begin + 300)}
        parent, number = int(arrays.parents[token]), int(arrays.tokens[token])
        position, slot = int(arrays.positions[token]), int(arrays.slots[token])
        found.append((number, position, slot, parent - begin if parent >= 0 else -1, read))
    return found


@pytest.mark.parametrize("most_nodes", [5, 14, 40, 90])
@pytest.mark.parametrize("seed", range(8))
def test_the_device_lays_a_step_out_as_the_host_would(seed: int, most_nodes: int) -> None:
    random = np.random.default_rng(seed)
    rows, division = random_rows(random, 5 if most_nodes < 50 else 2, most_nodes), Division(1 + seed % 8, 16, 64)
    arrays, batch = followed(rows, random, division)
    known = [BatchRow(row.pages, row.context, np.array([row.root], np.int32), row.tree, 0) for row in rows]
    by_host = lay_out(known)
    expected = filled(by_host, division)
    for i, row in enumerate(rows):
        count, begin = 1 + len(row.tree), int(batch.cu_seqlens[i])
        sees = row.context + count
        assert layouts(arrays, begin, count, sees) == layouts(expected, int(by_host.cu_seqlens[i]), count, sees)
        padding = slice(begin + count, int(batch.cu_seqlens[i + 1]))
        assert (arrays.slots[padding] == -1).all()
        assert (arrays.parents[padding] == -1).all()


@pytest.fixture
def device_drafts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(guard, "time", Clock())  # what is interpreted takes too long for drafts that pay
    sizes = DeviceSizes(rows=3, row_tokens=128, tenants=2, tenant_tokens=1024, nodes=NODES, contexts=1024)
    with drafts_on_device(sizes, DEVICE.type) as device:
        yield device


def ahead() -> Engine:
    return engine_of(served("llama"), NODES, max_running=3, prefill_chunk=64, steps_ahead=True)


def asked(strategies: SequenceOf[Any], sampling: SamplingParams = GREEDY, nodes: int = NODES) -> list[Sequence]:
    return [
        make_sequence(str(i), prompt, StopParams(NEW_TOKENS), sampling, strategy=strategy, max_draft_nodes=nodes)
        for i, (prompt, strategy) in enumerate(zip(PROMPTS, strategies, strict=False))
    ]


def test_without_drafts() -> None:
    engine, sequences = ahead(), asked([None] * 2)
    run(engine, *sequences)
    assert [one.output for one in sequences] == [written("llama", prompt) for prompt in PROMPTS[:2]]
    assert engine.counts.steps_ahead > NEW_TOKENS // 2


def test_with_drafts_of_the_device(device_drafts: Any) -> None:
    """Of two tenants, from their memories, one of them mixed with a successor table, beside one without drafts."""
    strategies = [create("hybrid"), create("trie"), None]
    for strategy, prompt in zip(strategies[:2], PROMPTS, strict=False):
        assert isinstance(strategy, DeviceStrategy)
        strategy.learn(np.array([*prompt, *written("llama", prompt)], np.int32))
    engine, sequences = ahead(), asked(strategies)
    run(engine, *sequences)
    assert [one.output for one in sequences] == [written("llama", prompt) for prompt in PROMPTS]
    assert engine.counts.steps_ahead
    assert all(one.stats.accepted_tokens >= NEW_TOKENS // 2 for one in sequences[:2])
    assert not any(one.stats.drafting_disabled_reason for one in sequences)


def test_sampled_with_drafts_of_the_device(device_drafts: Any) -> None:
    """As the torch runner, whose tokens the host chooses, with the same seed."""
    sampling, strategy = SamplingParams(temperature=0.9, top_p=0.8, seed=5), create("trie")
    [expected] = asked([None], sampling)
    run(engine_of(served("llama", "torch"), NODES), expected)
    assert isinstance(strategy, DeviceStrategy)
    strategy.learn(np.array([*PROMPTS[0], *expected.output], np.int32))
    engine, [one] = ahead(), asked([strategy], sampling, nodes=3)
    run(engine, one)
    assert one.output == expected.output
    assert one.output != written("llama", PROMPTS[0])
    assert engine.counts.steps_ahead
    assert one.stats.accepted_tokens
