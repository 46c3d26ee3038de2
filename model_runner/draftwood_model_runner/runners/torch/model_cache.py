"""Models that attend in code of their own: one forward pass for each batch row, over a cache of transformers in our
pages.

What a model puts into this cache is kept as keys and values. A layer of the cache gives its model all entries of the
sequence, and drops none behind a window: the masks that transformers makes leave them out.
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, LinearAttentionCacheLayerMixin

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.base import KVShape, StepBatch
from draftwood_model_runner.runners.model_calls import (
    cache_argument_of,
    logits_of_rows,
    positions_of_step,
    takes_positions,
)
from draftwood_model_runner.runners.torch.attention import TorchBatch
from draftwood_model_runner.runners.torch.kv_cache import KVCache, LayerParts, ModelCache, StepEntries
from draftwood_model_runner.runners.torch.states import states_of_step

_CHUNKED = "chunked_attention"


class RowMemory:
    """The entries of one batch row that is the only one of `batch`."""

    def __init__(self, kv: KVCache, batch: StepBatch) -> None:
        self._kv = kv
        self._entries = StepEntries(kv, batch)
        self.device = kv.layout.device
        self.context = int(batch.context_lens[0])
        self.end = self.context + batch.size

    def extended(self, part: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys [1, head, T, size] and values alike; returns those of the whole row [1, head, end, size]."""
        if keys.shape[0] != 1 or keys.shape[2] != self.end - self.context:
            raise ValueError(
                f"the model put {tuple(keys.shape)} keys into its cache for {self.end - self.context} tokens"
            )
        self._entries.write(part, keys[0], values[0])
        all_keys, all_values = self._entries.read(part, 0)
        return all_keys[None, :, : self.end].to(keys.dtype), all_values[None, :, : self.end].to(values.dtype)


class _PagedLayer(CacheLayerMixin):
    """A layer of the cache of one batch row."""

    is_sliding = False

    def __init__(self, row: RowMemory, parts: LayerParts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._row, self._parts = row, parts
        self._length = row.context
        self.is_initialized = parts.states is not None
        self.keys = self.values = torch.empty(0)
        self.indexer_position_ids: torch.Tensor | None = None
        if parts.indexer is not None and row.context:  # kept by models whose positions have several dimensions
            self.indexer_position_ids = torch.arange(row.context, device=row.device).expand(3, 1, -1)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._parts.states is not None
        self.keys, self.values = self._row.extended(self._parts.states, key_states, value_states)
        self._length = self._row.end
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Keeps keys [1, T, size]; returns those of the whole row [1, end, size]."""
        assert self._parts.indexer is not None
        states = indexer_key_states[:, None]
        return self._row.extended(self._parts.indexer, states, states[..., :0])[0][:, 0]

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """All full windows of the row, from its beginning on: averages are computed again in each step, so none is of
        tokens that were not accepted."""
        part = dict(self._parts.compressed)[name]
        all_kv, all_gate = self._row.extended(part, kv[:, None], gate[:, None])
        usable = all_kv.shape[2] // self._parts.window * self._parts.window
        return all_kv[:, 0, :usable], all_gate[:, 0, :usable], 0

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """`compressed`, which is of the whole row."""
        return compressed

    def update_overlap_state(self, name: str, chunk_kv: torch.Tensor, *args: Any) -> tuple[None, None]:
        """Nothing is before the first window."""
        return None, None


def cache_of(row: RowMemory, model_cache: ModelCache) -> Cache:
    """The cache that a model is given for a batch row."""
    return Cache(layers=[_PagedLayer(row, parts) for parts in model_cache.layers])


def find_model_cache(
    module: Any, tokens: torch.Tensor, stateful: bool = False
) -> tuple[ModelCache, tuple[KVShape, ...], torch.dtype]:
    """What a model keeps for each token, found out by running it on `tokens`, int64[1, n].

    Args:
        stateful: it may have layers that keep a state, which is kept elsewhere.

    Raises:
        UnsupportedModelError: it keeps something else, or nothing that is handed on from step to step.
    """
    name = type(module).__name__
    cache = module(input_ids=tokens, use_cache=True).get(cache_argument_of(module.__class__))
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not isinstance(cache, Cache):
        raise UnsupportedModelError(
            f"{name} keeps no keys and values in a cache of transformers, so nothing of a sequence can be kept for its"
            " next step"
        )
    shapes: list[KVShape] = []
    keeps_states = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers]
    if not stateful and any(keeps_states):
        raise UnsupportedModelError(
            f"{name}: layer {keeps_states.index(True)} keeps a recurrent state, which cannot be taken back behind"
            " tokens that were not accepted"
        )
    layers = tuple(_parts(name, index, layer, shapes) for index, layer in enumerate(cache.layers))
    kept = [getattr(layer, "keys", None) for layer in cache.layers]
    dtypes = {keys.dtype for keys in kept if isinstance(keys, torch.Tensor)}
    if len(dtypes) != 1:
        raise UnsupportedModelError(f"{name} keeps keys of {len(dtypes)} dtypes; one is supported")
    return ModelCache(layers), tuple(shapes), dtypes.pop()


def _parts(name: str, index: int, layer: Any, shapes: list[KVShape]) -> LayerParts:
    """The parts of a layer of the model's own cache; adds their shapes."""

    def add(heads: int, keys: torch.Tensor, values: int) -> int:
        shapes.append(KVShape(heads, keys.shape[-1], values))
        return len(shapes) - 1

    states = indexer = None
    keys: Any = getattr(layer, "keys", None)
    if keys is not None:
        if keys.dim() != 4:
            raise UnsupportedModelError(f"{name}: layer {index} keeps keys of {keys.dim()} dimensions; 4 are supported")
        states = add(keys.shape[1], keys, layer.values.shape[-1])
    if getattr(layer, "indexer_keys", None) is not None:
        indexer = add(1, layer.indexer_keys, 0)
    averaged = getattr(layer, "buffer_kv", {})
    compressed = tuple((part, add(1, kv, layer.buffer_gate[part].shape[-1])) for part, kv in averaged.items())
    return LayerParts(states, indexer, compressed, getattr(layer, "compress_rate", 0))


def forward_by_row(module: Any, batch: StepBatch, kv: KVCache, model_cache: ModelCache) -> torch.Tensor:
    """Logits [R, vocab]; writes what the model keeps of the batch."""
    return torch.cat([_row_forward(module, row, kv, model_cache) for row in _rows(batch)])


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


def _row_forward(module: Any, row: StepBatch, kv: KVCache, model_cache: ModelCache) -> torch.Tensor:
    device = kv.layout.device
    positions = torch.from_numpy(row.positions.astype(np.int64)).to(device)
    inputs: dict[str, Any] = {
        cache_argument_of(module.__class__): cache_of(RowMemory(kv, row), model_cache),
        "use_cache": True,
    }
    if takes_positions(module.__class__):
        inputs["position_ids"] = positions[None]
    if model_cache.tree_masks is not None and not _is_chain(row):
        inputs["attention_mask"] = _tree_masks(module, TorchBatch(row, kv), model_cache.tree_masks)
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
    """The part of a mask that lies in the chunk of positions of each token."""
    context, finite = int(batch.context_lens[0]), torch.finfo(full.dtype).min
    of_entries = torch.cat([torch.arange(context), torch.from_numpy(batch.positions.astype(np.int64))]) // chunk
    of_entries = of_entries.to(full.device)
    return full.masked_fill(of_entries[None, :] != of_entries[context:, None], finite)


@cache
def _takes_cache_position(model_class: Any) -> bool:
    return "cache_position" in inspect.signature(model_class.forward).parameters
