"""The functions of recurrent layers over the draft trees of a step, compiled for CPUs, see `runners.scanning`.

Each token takes its state from its parent's. So a node costs the same in a chain and in a tree, and is computed the
same way whatever else is in the step. A batch row is first its replayed tokens (accepted nodes of the step before) and
its chain, which change its state in place, and then its nodes, whose states are in a workspace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from transformers.activations import ACT2FN

from draftwood_model_runner.runners.scanning import Convolution, Scan, StateSpace, time_steps
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.threads import in_threads, parts

_EPSILON = 1e-6
"""In the norms of queries and keys, as in transformers."""

BoolArray = npt.NDArray[np.bool_]

_THREADED = 1 << 22
"""Numbers of states that are read and written from which on threads pay."""
_NO_HEADS, _NO_BETAS = torch.empty(0), torch.empty(0, 0)
"""What one recurrence has and the other has not."""


@numba.njit(cache=True, nogil=True)
def ancestors(parents: Int32Array, cu_seqlens: Int32Array, replayed_offsets: Int32Array, places: Int32Array) -> None:
    """For each token the entries of a convolution's inputs that it takes, itself first, in `places` int32[T, K].

    The inputs are K - 1 of each row's state, oldest first, then the replayed tokens of all rows, then the step's.

    Args:
        parents: int32[T], within a row; -1 for its beginning.
        cu_seqlens: int32[S + 1], of the tokens of each row.
        replayed_offsets: int32[S + 1], of its replayed ones.
    """
    rows, kept = cu_seqlens.shape[0] - 1, places.shape[1] - 1
    old, new = rows * kept, rows * kept + replayed_offsets[rows]
    for s in range(rows):
        replayed = replayed_offsets[s + 1] - replayed_offsets[s]
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            at = t - cu_seqlens[s]
            for tap in range(kept + 1):
                behind = -1 - at
                if at >= 0:
                    places[t, tap] = new + cu_seqlens[s] + at
                    at = parents[cu_seqlens[s] + at]
                    continue
                if behind < replayed:
                    places[t, tap] = old + replayed_offsets[s + 1] - 1 - behind
                else:
                    places[t, tap] = s * kept + kept - 1 - (behind - replayed)
                at -= 1


@numba.njit(cache=True, nogil=True, fastmath={"contract"})
def recurrence(
    query: Float32Array,
    key: Float32Array,
    value: Float32Array,
    gates: Float32Array,
    betas: Float32Array,
    old_key: Float32Array,
    old_value: Float32Array,
    old_gates: Float32Array,
    old_betas: Float32Array,
    rates: Float32Array,
    skips: Float32Array,
    parents: Int32Array,
    inner: BoolArray,
    cu_seqlens: Int32Array,
    roots: Int32Array,
    page_ends: Int32Array,
    replayed_offsets: Int32Array,
    states: Float32Array,
    ends: Float32Array,
    nodes: Float32Array,
    sums: Float32Array,
    heads: tuple[int, int],
    output: Float32Array,
) -> None:
    """The gated delta rule (Yang et al., 2024, arXiv 2412.06464), or with rates the recurrence of Mamba 2 (Dao and Gu,
    2024, arXiv 2405.21060), for some heads, `heads[0]` to `heads[1]`.

    Args:
        query, key: [T, key heads, K]; value: [T, H, V]; C, B and x of Mamba 2.
        gates: logarithms of decays [T, H, 1 or K]; of Mamba 2 time steps [T, H, 1].
        betas: [T, H]; of Mamba 2 [0, 0].
        old_key, old_value, old_gates, old_betas: the same of replayed tokens.
        rates, skips: A and D [H] of Mamba 2; [0] for the delta rule.
        parents: int32[T], within a row.
        inner: bool[T], which nodes have children.
        roots: int32[S], the last token of each row's chain.
        page_ends: int32[S], the first token behind those after which the state goes to `ends`; -1 for none.
        states: [S, H, K, V], before the replayed tokens; afterwards behind the roots.
        ends: [S, H, K, V].
        nodes: [most nodes of a row, K, V] and sums: [2, V], workspace.
        output: [T, H, V].
    """
    group, delta = value.shape[1] // key.shape[1], rates.shape[0] == 0
    for s in range(roots.shape[0]):
        for h in range(heads[0], heads[1]):
            state, shared = states[s, h], h // group
            for t in range(replayed_offsets[s], replayed_offsets[s + 1]):
                k, v, g = old_key[t, shared], old_value[t, h], old_gates[t, h]
                if delta:
                    _delta_token(state, state, k, k, v, g, old_betas[t, h], True, sums[0], sums[1])
                else:
                    _state_space_token(state, state, k, k, v, g[0], rates[h], True, sums[0])
            for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
                node, above = t - roots[s] - 1, parents[t] - (roots[s] - cu_seqlens[s]) - 1
                before = state if node < 0 or above < 0 else nodes[above]
                after = state if node < 0 else nodes[max(node, 0)]
                q, k, v, g, out = query[t, shared], key[t, shared], value[t, h], gates[t, h], output[t, h]
                keeps = node < 0 or inner[t]
                if delta:
                    _delta_token(before, after, q, k, v, g, betas[t, h], keeps, sums[0], out)
                else:
                    _state_space_token(before, after, q, k, v, g[0], rates[h], keeps, out)
                    for j in range(out.shape[0]):
                        out[j] += skips[h] * v[j]
                if t + 1 == page_ends[s]:
                    ends[s, h] = state


@numba.njit(cache=True, nogil=True, fastmath={"contract"})
def _delta_token(
    before: Float32Array,
    after: Float32Array,
    query: Float32Array,
    key: Float32Array,
    value: Float32Array,
    decay: Float32Array,
    beta: np.float32,
    keeps: bool,
    delta: Float32Array,
    output: Float32Array,
) -> None:
    """One token of one head: its output [V], and the state [K, V] after it if `keeps`. `delta` is workspace."""
    rows, columns = before.shape
    of_query, of_key = np.float32(_EPSILON), np.float32(_EPSILON)
    for i in range(rows):
        of_query += query[i] * query[i]
        of_key += key[i] * key[i]
    of_query = np.float32(1.0) / (np.sqrt(of_query) * np.sqrt(np.float32(rows)))
    of_key = np.float32(1.0) / np.sqrt(of_key)
    fading, common = np.exp(decay[0]), np.float32(0.0)
    for j in range(columns):
        delta[j] = output[j] = np.float32(0.0)
    for i in range(rows):
        if decay.shape[0] > 1:
            fading = np.exp(decay[i])
        k, q = key[i] * of_key, query[i] * of_query
        common += k * q
        k *= fading
        q *= fading
        for j in range(columns):
            delta[j] += k * before[i, j]
            output[j] += q * before[i, j]
    for j in range(columns):
        delta[j] = (value[j] - delta[j]) * beta
        output[j] += common * delta[j]
    if not keeps:
        return
    for i in range(rows):
        if decay.shape[0] > 1:
            fading = np.exp(decay[i])
        k = key[i] * of_key
        for j in range(columns):
            after[i, j] = fading * before[i, j] + k * delta[j]


@numba.njit(cache=True, nogil=True, fastmath={"contract"})
def _state_space_token(
    before: Float32Array,
    after: Float32Array,
    query: Float32Array,
    key: Float32Array,
    value: Float32Array,
    step: np.float32,
    rate: np.float32,
    keeps: bool,
    output: Float32Array,
) -> None:
    """One token of one head, see `_delta_token`; the output is without what skips the recurrence."""
    rows, columns = before.shape
    fading = np.float32(math.exp(step * rate))
    for j in range(columns):
        output[j] = np.float32(0.0)
    for i in range(rows):
        k, q = key[i] * step, query[i]
        for j in range(columns):
            number = fading * before[i, j] + k * value[j]
            output[j] += q * number
            if keeps:
                after[i, j] = number


@dataclass(frozen=True, eq=False)
class StepShape:
    """The tokens of a step, as scans take them.

    Attributes:
        parents: int32[T], within a batch row.
        cu_seqlens: int32[S + 1], of the tokens of each row.
        roots: int32[S], the last token of each row's chain.
        page_ends: int32[S], the first token behind those after which its state is kept; -1 for none.
        is_prompt: bool[T], which tokens are of a prompt.
        replayed_offsets: int32[S + 1], of replayed tokens: the accepted nodes of the step before.
        workspaces: kept from layer to layer.
    """

    parents: Int32Array
    cu_seqlens: Int32Array
    roots: Int32Array
    page_ends: Int32Array
    is_prompt: torch.Tensor
    replayed_offsets: Int32Array
    workspaces: dict[Any, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return int(self.roots.size)

    @property
    def size(self) -> int:
        return int(self.parents.size)

    def inner(self) -> Any:
        """bool[T], which tokens have children."""
        if "inner" not in self.workspaces:
            inner, counts = np.zeros(self.size, np.bool_), self.cu_seqlens[1:] - self.cu_seqlens[:-1]
            absolute = self.parents + np.repeat(self.cu_seqlens[:-1], counts)
            inner[absolute[self.parents >= 0]] = True
            self.workspaces["inner"] = inner
        return self.workspaces["inner"]

    def taps(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which entries a convolution over `width` inputs takes for each token, int64[T * width], oldest first;
        which are its state after each root, int64[S * (width - 1)], and after each end of a page, if a row has one."""
        if width not in self.workspaces:
            places = np.empty((self.size, width), np.int32)
            ancestors(self.parents, self.cu_seqlens, self.replayed_offsets, places)
            places = places[:, ::-1].astype(np.int64)
            after = [places[self.roots, 1:], places[self.page_ends[self.page_ends >= 0] - 1, 1:]]
            self.workspaces[width] = tuple(
                torch.from_numpy(np.ascontiguousarray(part).reshape(-1)) for part in (places, *after)
            )
        taps: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.workspaces[width]
        return taps

    def nodes(self, threads: int, rows: int, columns: int) -> tuple[Any, Any]:
        """Workspaces for the states of nodes and for sums, one of each for a thread."""
        key = threads, rows, columns
        if key not in self.workspaces:
            nodes = int((self.cu_seqlens[1:] - self.roots - 1).max())
            shapes = (threads, max(1, nodes), rows, columns), (threads, 2, columns)
            self.workspaces[key] = tuple(np.empty(shape, np.float32) for shape in shapes)
        arrays: tuple[Any, Any] = self.workspaces[key]
        return arrays


class HostScan(Scan):
    """One call of a recurrent layer.

    Args:
        step: the tokens.
        states: of each row; {} at the beginning of a sequence.
        earlier: of each kind of input, in the order of the calls, those of replayed tokens; [] for none.

    Attributes:
        states: of each kind, after the chains of all rows [S, ...].
        ends: of each kind, at the ends of pages, of the rows that have one [B, ...].
        inputs: what further steps may replay, in the order of the calls, each [T, ...].
    """

    def __init__(self, step: StepShape, states: Sequence[dict[Any, torch.Tensor]], earlier: list[torch.Tensor]) -> None:
        super().__init__()
        self._step = step
        self._before = states
        self._earlier = earlier
        self.states: dict[tuple[str, int], torch.Tensor] = {}
        self.ends: dict[tuple[str, int], torch.Tensor] = {}
        self.inputs: list[torch.Tensor] = []

    def convolve_inputs(self, call: Convolution) -> torch.Tensor:
        number, inputs, weight, bias, activation = call
        kind, width, tokens = ("conv", number), weight.shape[1], inputs[0].t()
        mine = tokens[: self._step.size].to(weight.dtype)
        if width - 1:
            blank = mine.new_zeros(1, width - 1, mine.shape[1])
            kept = [row.get(kind, blank)[0] for row in self._before]
            entries = torch.cat([*kept, *self._replayed(mine), mine])
        else:
            entries = torch.cat([*self._replayed(mine), mine])
        taken, roots, page_ends = self._step.taps(width)
        self.states[kind] = entries[roots].view(self._step.rows, width - 1, -1)
        self.ends[kind] = entries[page_ends].view(-1, width - 1, mine.shape[1])
        mixed = (entries[taken].view(self._step.size, width, -1) * weight.t()).sum(1)
        if bias is not None:
            mixed = mixed + bias
        if activation is not None:
            mixed = ACT2FN[activation](mixed)
        return _filled(mixed, tokens.shape[0]).t()[None].to(inputs.dtype)

    def scan_deltas(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        decay = g if g.dim() == 4 else g[..., None]
        of_tokens = [self._own(part) for part in (query, key, value, decay, beta)]
        replayed = [self._replay(part) for part in of_tokens[1:]]
        output = self._recurrence(of_tokens, replayed, _NO_HEADS, _NO_HEADS)
        return _filled(output, query.shape[1])[None].to(query.dtype)

    def scan_states(self, given: StateSpace) -> torch.Tensor:
        dt, heads = given.dt[0, : self._step.size], given.inputs.shape[2]
        steps = time_steps(dt, given.bias, given.softplus, given.limit, self._step.is_prompt).contiguous()
        of_tokens = [*(self._own(part) for part in (given.read, given.written, given.inputs)), steps[..., None]]
        replayed = [self._replay(part) for part in of_tokens[1:]]
        skips = torch.zeros(heads) if given.skips is None else given.skips
        rates, skips = (part.detach().float().contiguous() for part in (given.rates, skips))
        output = self._recurrence([*of_tokens, _NO_BETAS], [*replayed, _NO_BETAS], rates, skips)
        return _filled(output, given.inputs.shape[1])[None]

    def _recurrence(
        self, of_tokens: list[torch.Tensor], replayed: list[torch.Tensor], rates: torch.Tensor, skips: torch.Tensor
    ) -> torch.Tensor:
        """Outputs [T, heads, columns]; keeps the states [S, heads, rows, columns]. The arguments are the kernel's."""
        (heads, columns), rows = of_tokens[2].shape[1:], of_tokens[1].shape[2]
        kernel: Any = recurrence
        step, kind = self._step, ("recurrent", 0)
        blank = torch.zeros(1, heads, rows, columns)
        states = torch.cat([row.get(kind, blank) for row in self._before])
        ends_page = step.page_ends >= 0
        ends = torch.empty(step.rows if ends_page.any() else 0, heads, rows, columns)
        output = torch.empty(step.size, heads, columns)
        tokens = step.size + int(step.replayed_offsets[-1])
        threads = torch.get_num_threads() if tokens * heads * rows * columns >= _THREADED else 1
        shares = parts(heads, threads)
        nodes, sums = step.nodes(len(shares), rows, columns)
        fixed = [part.numpy() for part in (*of_tokens, *replayed, rates, skips)]
        fixed += [step.parents, step.inner(), step.cu_seqlens, step.roots, step.page_ends, step.replayed_offsets]
        fixed += [states.numpy(), ends.numpy()]
        in_threads(
            [
                partial(kernel, *fixed, nodes[i], sums[i], (share.start, share.stop), output.numpy())
                for i, share in enumerate(shares)
            ],
            threads,
        )
        self.states[kind] = states
        self.ends[kind] = ends[torch.from_numpy(ends_page)] if ends.shape[0] else ends
        return output

    def _own(self, part: torch.Tensor) -> torch.Tensor:
        """[T, ...] in float32, in order, of the tokens that are not there to fill up."""
        return part[0, : self._step.size].float().contiguous()

    def _replayed(self, part: torch.Tensor) -> list[torch.Tensor]:
        """What `part`, [T, ...], was for replayed tokens, in a list; [] for none. Keeps it for further steps."""
        self.inputs.append(part)
        number = len(self.inputs) - 1
        return [self._earlier[number]] if self._earlier else []

    def _replay(self, part: torch.Tensor) -> torch.Tensor:
        replayed = self._replayed(part)
        return replayed[0].contiguous() if replayed else part[:0]


def _filled(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """[width, ...] with zeros behind the tokens, [T, ...]."""
    missing = width - tokens.shape[0]
    return torch.cat([tokens, tokens.new_zeros(missing, *tokens.shape[1:])]) if missing else tokens
