"""A cache of transformers over our pages: what a model puts there with its own attention is kept as keys and values.

For models that compute attention in code of their own. A layer of the cache gives its model all entries of the
sequence, and drops none behind a window: the masks that transformers makes leave them out.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, LinearAttentionCacheLayerMixin

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.base import KVShape, StepBatch
from draftwood_model_runner.runners.model_inputs import cache_argument_of
from draftwood_model_runner.runners.torch.kv_cache import KVCache, LayerParts, OwnCache, StepEntries


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
        """Of [1, T, size], those of the whole row [1, end, size]."""
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


def cache_of(row: RowMemory, own: OwnCache) -> Cache:
    """The cache that a model is given for a batch row."""
    return Cache(layers=[_PagedLayer(row, parts) for parts in own.layers])


def own_cache(
    module: Any, tokens: torch.Tensor, stateful: bool = False
) -> tuple[OwnCache, tuple[KVShape, ...], torch.dtype]:
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
    return OwnCache(layers), tuple(shapes), dtypes.pop()


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
