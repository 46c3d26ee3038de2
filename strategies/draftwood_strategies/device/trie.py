"""The trie strategy on a device: the memories of several tenants, and the texts of live rows, in one arena there.

Everything is queued on the current stream, and nothing waits for the device or is read from it but by `tokens` and
`sequences`. The calls of a step take tensors of the device alone, so that a CUDA graph can have them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.built_in import TrieOptions
from draftwood_strategies.device.arena import (
    ADDED,
    BACKS_OFF,
    CURSOR,
    FOLLOWED_MEMORY,
    FOLLOWED_TEXT,
    LEARNS,
    MEMORY,
    MEMORY_AT,
    MIXED,
    NOVEL_AT,
    ODDS_AT,
    OWNER,
    PROMPT_END,
    RECORDED,
    REGION,
    STATE,
    TEXT,
    TEXT_AT,
    TOKENS,
    UNIT_BITS,
    USED,
    WRITTEN,
    ArenaTooLargeError,
    DeviceSizes,
    Layout,
    Region,
)
from draftwood_strategies.device.calls import append, draft, learn
from draftwood_strategies.device.launching import launch, require_triton
from draftwood_strategies.mixing.candidates import Weights as MixtureWeights
from draftwood_strategies.mixing.candidates import prior_weights as mixture_prior
from draftwood_strategies.trie.phrase_index import NOWHERE, START, stored_sequences
from draftwood_strategies.trie.weights import COUNTED, Weights, prior_weights

_EVERYTHING = 1 << 29
"""More tokens than a sequence has, and less than int32 has left for it."""
_NO_REGION = -1


class DeviceDrafts(NamedTuple):
    """Drafts of b rows, of at most n nodes each, on the device: what `DeviceTrie.propose` writes.

    Attributes:
        tokens, parents, scores: int32[b, n], int32[b, n] and float32[b, n], of each row as in `DraftTree`.
        counts: int32[b], how many nodes each row has.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor


class DeviceTrie:
    """Memories of phrases and learned weights, a tenant each, and the rows that draft from them.

    A tenant without a region of the arena gets a free one, or the region of the tenant that was not used for longest
    and has no live rows, whose memory is lost. While there is none, its rows draft from their own texts with weights as
    they are before any traffic, and nothing is learned from them.

    Args:
        options: all but `capacity_tokens`, which the sizes say.

    Attributes:
        arena: int32[layout.size].
        leaving: called with a tenant before another one gets its region.

    Raises:
        ArenaTooLargeError: the arena does not fit the memory that is free.
        DeviceUnsupportedError: Triton is missing on a GPU.
    """

    def __init__(self, sizes: DeviceSizes, device: torch.device, options: TrieOptions | None = None) -> None:
        require_triton(device)
        self.layout = Layout(sizes)
        self.options = options or TrieOptions()
        self.device = device
        self.arena = _allocated(self.layout, device)
        parts = self.layout.memories, self.layout.weights, self.layout.states
        self._texts = self.arena[: parts[0]].view(sizes.rows, -1)
        self._memories = self.arena[parts[0] : parts[1]].view(sizes.tenants, -1)
        self._weights = self.arena[parts[1] : parts[2]].view(sizes.tenants + 1, -1)
        self._states = self.arena[parts[2] : parts[2] + sizes.rows * STATE].view(sizes.rows, STATE)
        self._branch_length = min(self.options.branch_length, sizes.depth)
        self.arena[self.layout.misses : self.layout.misses + sizes.rows] = NOWHERE
        self._numbers = torch.arange(sizes.rows, dtype=torch.int32, device=device)
        self._prior = self.uploaded(_whole_numbers(prior_weights(self.options.prompt_weight), self.layout))
        self._nothing_followed = self.uploaded(np.array([NOWHERE, 0], np.int32))
        self._weights.copy_(self._prior)
        self._states[:, REGION] = _NO_REGION
        _empty(self._texts, self.layout.text)
        _empty(self._memories, self.layout.memory)
        self._regions: dict[str, int] = {}  # the tenant that was used last comes last
        self._free = [*reversed(range(sizes.tenants))]
        self._tenants: dict[int, str] = {}
        self._owners = itertools.cycle(range(1, START))
        self.leaving: Callable[[str], None] = lambda tenant: None

    def begin(self, row: int, tenant: str, learns: bool = True, backs_off: bool = True) -> None:
        """Begins a sequence of a tenant in a row, whose last one has ended.

        Args:
            learns: the memory and the weights learn from it.
            backs_off: draft novel tokens, see `trie.weights.Novel`.
        """
        self.end(row)
        region = self._region_of(tenant)
        self._tenants[row] = tenant
        _empty(self._texts[row], self.layout.text)
        state = np.zeros(STATE, np.int32)
        state[[PROMPT_END, TEXT_AT, MEMORY_AT, FOLLOWED_TEXT, FOLLOWED_MEMORY]] = NOWHERE
        state[REGION], state[LEARNS] = region, learns and region != _NO_REGION
        state[BACKS_OFF] = backs_off
        state[WRITTEN], state[OWNER] = self._written_before, next(self._owners)
        self._states[row].copy_(self.uploaded(state))

    def end(self, row: int) -> None:
        """The memory keeps what was learned. A row that has no sequence stays as it is."""
        if self._tenants.pop(row, None) is not None:
            self._states[row, REGION].fill_(_NO_REGION)

    def free_row(self) -> int | None:
        """A row without a sequence; None if there is none."""
        return next((row for row in range(self.layout.sizes.rows) if row not in self._tenants), None)

    def append_prompts(self, rows: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor) -> None:
        """Adds pieces of prompts to rows: of row `rows[r]` the tokens `tokens[offsets[r] : offsets[r + 1]]`.

        Args:
            rows: int32[r], negative for none.
            tokens, offsets: int32[n] and int32[r + 1].
        """
        if self.options.learn != "outputs":
            self.append_to_memories(rows, tokens, offsets)
        self.append_to_texts(rows, tokens, offsets, counted=self.options.learn == "both")

    def append_to_memories(self, rows: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor) -> None:
        """Goes on with what the tenants' memories have of rows that they learn from; see `append_prompts`."""
        append(self.arena, self.layout, MEMORY, rows, tokens, offsets, offsets[1:] - offsets[:-1])

    def append_to_texts(self, rows: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor, counted: bool) -> None:
        """Goes on with the rows' own texts; see `append_prompts`.

        Args:
            counted: the memories of rows that they learn from have these tokens.
        """
        counts = offsets[1:] - offsets[:-1]
        append(self.arena, self.layout, TEXT, rows, tokens, offsets, counts, counted=counted)

    def begin_outputs(self, rows: torch.Tensor) -> None:
        """The prompts of these rows, int32[r], negative for none, are complete."""
        if rows.shape[0]:
            launch("appending", "begin_outputs", (rows.shape[0],), self.arena, rows, STATES=self.layout.states)

    def learn(self, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Learns from the rows' latest drafts, and adds the accepted tokens to the texts and the memories.

        Args:
            rows: int32[b], each row once; negative for none.
            tokens: int32[b, k], of which row `rows[r]` has accepted the first `counts[r]`.
            counts: int32[b]; 0 leaves a row as it is.
        """
        b, k = tokens.shape
        learn(self.arena, self.layout, rows, tokens, counts, self._branch_length)
        begins = self._numbers[:b]
        append(self.arena, self.layout, TEXT, rows, tokens, begins, counts, stride=k, counted=True)
        if self.options.learn != "prompts":
            append(self.arena, self.layout, MEMORY, rows, tokens, begins, counts, stride=k)

    def propose(self, rows: torch.Tensor, budgets: torch.Tensor, out: DeviceDrafts) -> None:
        """Drafts for rows whose outputs have begun.

        Args:
            rows, budgets: int32[b], each row once, negative for none, and the most nodes of its draft.
            out: for b rows.
        """
        draft(self.arena, self.layout, rows, budgets, self._branch_length, out, chains=False)

    def propose_chains(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        out_tokens: torch.Tensor,
        out_scores: torch.Tensor,
        out_counts: torch.Tensor,
    ) -> None:
        """Drafts without branches, each token the child of the one before it.

        Args:
            rows, lengths: int32[b], each row once, negative for none, and the most tokens of its draft.
            out_tokens, out_scores, out_counts: int32[b, n], float32[b, n] and int32[b].
        """
        out = out_tokens, out_tokens, out_scores, out_counts
        draft(self.arena, self.layout, rows, lengths, self._branch_length, out, chains=True)

    def import_runs(self, tenant: str, runs: Sequence[Int32Array]) -> None:
        """Adds whole recorded sequences, int32[n] each, to a tenant's memory; to none if every region has live rows."""
        runs = [run for run in runs if run.shape[0]]
        region = self._region_of(tenant)
        if region == _NO_REGION or not runs:
            return
        counts = np.array([run.shape[0] for run in runs], np.int32)
        numbers = np.fromiter(self._owners, np.int32, counts.shape[0])
        arrays = (numbers, np.concatenate(runs).astype(np.int32), np.cumsum(counts, dtype=np.int32) - counts, counts)
        append(self.arena, self.layout, RECORDED, *map(self.uploaded, arrays), region=region)

    def set_weights(self, tenant: str, weights: Weights) -> None:
        """A tenant's weights are these from now on, if it has a region or can have one."""
        region = self._region_of(tenant)
        if region != _NO_REGION:
            self._weights[region].copy_(self.uploaded(_whole_numbers(weights, self.layout)))

    def claim(self, tenant: str) -> bool:
        """Gives a tenant a region, if it has none and there is one; returns whether it has one now."""
        return self._region_of(tenant) != _NO_REGION

    def has_region(self, tenant: str) -> bool:
        """Whether a tenant has one. On any thread."""
        return tenant in self._regions

    def forget(self, tenant: str) -> None:
        """Ends a tenant's rows, and frees its region if it has one."""
        for row in [row for row, owner in self._tenants.items() if owner == tenant]:
            self.end(row)
        region = self._regions.pop(tenant, None)
        if region is not None:
            self._reset(region)
            self._free.append(region)

    def learned(self, tenant: str) -> torch.Tensor | None:
        """A copy of a tenant's weights on the device for `set_learned`, int32[weights_size]; None without a region."""
        region = self._regions.get(tenant)
        return None if region is None else self._weights[region].clone()

    def set_learned(self, tenant: str, weights: torch.Tensor) -> None:
        """The weights of a tenant, which has a region, are these from now on: what `learned` returned."""
        self._weights[self._regions[tenant]].copy_(weights)

    def purge(self, tenant: str) -> None:
        """Forgets a tenant's memory and weights. Its live rows keep their own texts, and go on to be learned."""
        region = self._regions.get(tenant)
        if region is None:
            return
        self._reset(region)
        for row in (row for row, owner in self._tenants.items() if owner == tenant):
            state = self._states[row]
            state[MEMORY_AT].fill_(NOWHERE)
            state[WRITTEN].fill_(self._written_before)
            state[FOLLOWED_MEMORY : FOLLOWED_MEMORY + 2].copy_(self._nothing_followed)

    def tokens(self, tenant: str) -> int:
        """How many tokens a tenant's memory holds. Waits for the device."""
        region = self._regions.get(tenant)
        return 0 if region is None else int(self._memories[region, self.layout.memory.ring + TOKENS].item())

    def sequences(self, tenant: str) -> Iterator[Int32Array]:
        """The sequences in a tenant's memory, as `PhraseIndex.sequences`. Waits for the device."""
        region = self._regions.get(tenant)
        if region is None:
            return iter(())
        parts, numbers = self.layout.memory, self._memories[region]
        log: Int32Array = numbers[: parts.slots].cpu().numpy()
        table: Int32Array = numbers[parts.next : parts.heads].cpu().numpy()
        following, previous, owners = table[: 3 * parts.blocks].reshape(3, -1)
        cursor, used = table[parts.ring - parts.next :][[CURSOR, USED]].tolist()
        return stored_sequences(log, following, previous, owners, cursor if used == parts.blocks else 0)

    @property
    def _written_before(self) -> int:
        """How many tokens of a sequence the memory is taken to have before its prompt, see `retrieval.mark_start`."""
        return _EVERYTHING if self.options.learn == "prompts" else 0

    def _region_of(self, tenant: str) -> int:
        """The tenant's region, from now on the one that was used last; `_NO_REGION` if all others have live rows."""
        region = self._regions.pop(tenant, None)
        if region is None and self._free:
            region = self._free.pop()
        elif region is None:
            live = set(self._tenants.values())
            unused = next((other for other in self._regions if other not in live), None)
            if unused is None:
                return _NO_REGION
            self.leaving(unused)
            region = self._regions.pop(unused)
            self._reset(region)
        self._regions[tenant] = region
        return region

    def _reset(self, region: int) -> None:
        _empty(self._memories[region], self.layout.memory)
        self._weights[region].copy_(self._prior)

    def uploaded(self, numbers: Int32Array) -> torch.Tensor:
        """A copy on the device, which the host does not wait for."""
        host = torch.from_numpy(numbers)
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


def _allocated(layout: Layout, device: torch.device) -> torch.Tensor:
    """int32[layout.size], zeros."""
    needed = 4 * layout.size
    free = _free_bytes(device)
    if free is None or needed <= free:
        try:
            return torch.zeros(layout.size, dtype=torch.int32, device=device)
        except torch.OutOfMemoryError:
            pass
    raise ArenaTooLargeError(
        f"device drafts: the arena takes {needed / 1e9:.3g} GB, and {device} has {(free or 0) / 1e9:.3g} GB free"
    )


def _free_bytes(device: torch.device) -> int | None:
    """The memory that can be allocated, None if that is not known."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _empty(numbers: torch.Tensor, region: Region) -> None:
    """Forgets all tokens of regions, int32[..., region.size]. Links stay: none leads to them."""
    numbers[..., : region.links].fill_(NOWHERE)
    numbers[..., region.next : region.ring].fill_(NOWHERE)
    numbers[..., region.ring : region.heads].zero_()
    numbers[..., region.heads :].fill_(NOWHERE)


def _whole_numbers(weights: Weights, layout: Layout) -> Int32Array:
    """int32[layout.weights_size]: the host's weights as the arena has them."""
    found = np.zeros(layout.weights_size, np.int32)
    factors = np.concatenate([weights.features.reshape(-1), weights.escapes]).astype(np.float64)
    found[:ODDS_AT] = np.rint(np.log(factors) * (1 << UNIT_BITS))
    found[ODDS_AT:ADDED] = np.rint(weights.odds.astype(np.float64) * (1 << UNIT_BITS))
    if layout.sizes.contexts:
        found[layout.mixture : layout.mixture + MIXED] = whole_mixture(mixture_prior())
    found[NOVEL_AT : NOVEL_AT + COUNTED] = weights.novel["token"][:COUNTED]
    found[NOVEL_AT + COUNTED : NOVEL_AT + 2 * COUNTED + 1] = weights.novel["count"].copy().view(np.int32)
    return found


def whole_mixture(weights: MixtureWeights) -> Int32Array:
    """int32[MIXED]: the mixture's weights as the arena has them, those of the source with number 0."""
    parts = weights.ranks, weights.escapes, weights.trust[0], weights.bias[0]
    scaled = np.concatenate([part.reshape(-1) for part in parts]).astype(np.float64) * (1 << UNIT_BITS)
    return np.concatenate([np.rint(scaled), weights.seen.reshape(-1)]).astype(np.int32)
