"""A step of a model that attends in code of its own: one forward pass for each batch row, over a cache of our pages."""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

import numpy as np
import torch

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.logit_rows import logits_of_rows
from draftwood_model_runner.runners.model_inputs import cache_argument_of, positions_of_step, takes_positions
from draftwood_model_runner.runners.torch.kv_cache import KVCache, OwnCache
from draftwood_model_runner.runners.torch.own.cache import RowMemory, cache_of
from draftwood_model_runner.runners.torch.states.step import states_of_step
from draftwood_model_runner.runners.torch.torch_batch import TorchBatch

_CHUNKED = "chunked_attention"


def own_forward(module: Any, batch: StepBatch, kv: KVCache, own: OwnCache) -> torch.Tensor:
    """Logits [R, vocab]; writes what the model keeps of the batch."""
    return torch.cat([_row_forward(module, row, kv, own) for row in _rows(batch)])


def _rows(batch: StepBatch) -> list[StepBatch]:
    """Each batch row as a batch of its own."""
    ends, tables = batch.cu_seqlens, batch.cu_blocks
    rows = []
    for s in range(batch.rows):
        begin, end = int(ends[s]), int(ends[s + 1])
        table = slice(int(tables[s]), int(tables[s + 1]))
        of_row = batch.logit_rows[(batch.logit_rows >= begin) & (batch.logit_rows < end)]
        rows.append(
            StepBatch(
                tokens=batch.tokens[begin:end],
                positions=batch.positions[begin:end],
                parents=batch.parents[begin:end],
                cu_seqlens=np.array([0, end - begin], np.int32),
                context_lens=batch.context_lens[s : s + 1],
                block_table=batch.block_table[table],
                cu_blocks=np.array([0, table.stop - table.start], np.int32),
                logit_rows=of_row - begin,
                is_dummy=batch.is_dummy,
                prompt_lens=None if batch.prompt_lens is None else batch.prompt_lens[s : s + 1],
            )
        )
    return rows


def _row_forward(module: Any, row: StepBatch, kv: KVCache, own: OwnCache) -> torch.Tensor:
    device = kv.layout.device
    positions = torch.from_numpy(row.positions.astype(np.int64)).to(device)
    inputs: dict[str, Any] = {cache_argument_of(module.__class__): cache_of(RowMemory(kv, row), own), "use_cache": True}
    if takes_positions(module.__class__):
        inputs["position_ids"] = positions[None]
    if own.tree_masks is not None and not _is_chain(row):
        inputs["attention_mask"] = _tree_masks(module, TorchBatch(row, kv), own.tree_masks)
    if _takes_cache_position(module.__class__):
        inputs["cache_position"] = torch.arange(row.context_lens[0], row.context_lens[0] + row.size, device=device)
    tokens = torch.from_numpy(row.tokens.astype(np.int64)).to(device)
    rows = torch.from_numpy(row.logit_rows.astype(np.int64)).to(device)
    states = states_of_step(row, kv.states, row.size, device)
    with positions_of_step(positions[None]), states:
        return logits_of_rows(module, rows, input_ids=tokens[None], **inputs)


def _is_chain(row: StepBatch) -> bool:
    return bool((row.parents == np.arange(-1, row.size - 1)).all())


def _tree_masks(module: Any, row: TorchBatch, masks: str) -> Any:
    """[1, 1, T, entries], 0 or -inf, or one for each type of layer."""
    config = module.config.get_text_config(decoder=True)
    everything = slice(0, row.batch.size)
    full = _mask(row, None, everything)
    if masks == "one":
        return full
    of_kinds: dict[str, torch.Tensor | None] = {"full_attention": full, "linear_attention": None}
    for kind in set(getattr(config, "layer_types", None) or ()) - of_kinds.keys():
        if "sliding" in kind:
            of_kinds[kind] = of_kinds["sliding_attention"] = _mask(row, config.sliding_window, everything)
        else:
            of_kinds[kind] = full
        if kind == _CHUNKED:
            of_kinds[kind] = _chunked(full, row.batch, config.attention_chunk_size)
    return of_kinds


def _mask(row: TorchBatch, window: int | None, queries: slice) -> torch.Tensor:
    mask = row.mask(0, window, queries)
    assert mask is not None  # there are several tokens
    mask = torch.nn.functional.pad(mask, (row.first_entry(0, window), 0), value=-math.inf)
    finite = torch.finfo(mask.dtype).min  # some models add further masks, and -inf - -inf is no number
    return mask.clamp(min=finite)[None, None]


def _chunked(full: torch.Tensor, batch: StepBatch, chunk: int) -> torch.Tensor:
    """Of a mask, what lies in the chunk of positions of each token."""
    context, finite = int(batch.context_lens[0]), torch.finfo(full.dtype).min
    of_entries = torch.cat([torch.arange(context), torch.from_numpy(batch.positions.astype(np.int64))]) // chunk
    of_entries = of_entries.to(full.device)
    return full.masked_fill(of_entries[None, :] != of_entries[context:, None], finite)


@cache
def _takes_cache_position(model_class: Any) -> bool:
    return "cache_position" in inspect.signature(model_class.forward).parameters
