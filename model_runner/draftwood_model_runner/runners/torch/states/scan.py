"""The functions of a mixer over the draft trees of a step, on CPUs, see `runners.states.scanning`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.activations import ACT2FN

from draftwood_model_runner.runners.states.scanning import Convolution, Scan, StateSpace, time_steps
from draftwood_model_runner.runners.torch.states.kernels import ancestors, recurrence
from draftwood_strategies.draft import Int32Array
from draftwood_strategies.threads.row_threads import in_threads, parts

_THREADED = 1 << 22
"""Numbers of states that are read and written from which on threads pay."""
_NO_HEADS, _NO_BETAS = torch.empty(0), torch.empty(0, 0)
"""What one recurrence has and the other has not."""


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
        workspaces: kept from mixer to mixer.
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
        """Of a convolution over `width` inputs, which entries it takes for each token, int64[T * width], oldest first;
        which are its state after each root, int64[S * (width - 1)], and after each end of a page, if a row has one."""
        if width not in self.workspaces:
            places = np.empty((self.size, width), np.int32)
            ancestors(self.parents, self.cu_seqlens, self.replayed_offsets, places)
            places = places[:, ::-1].astype(np.int64)
            after = [places[self.roots, 1:], places[self.page_ends[self.page_ends >= 0] - 1, 1:]]
            self.workspaces[width] = tuple(
                torch.from_numpy(np.ascontiguousarray(part).reshape(-1)) for part in (places, *after)
            )
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.workspaces[width]
        return found

    def nodes(self, threads: int, rows: int, columns: int) -> tuple[Any, Any]:
        """Workspaces for the states of nodes and for sums, one of each for a thread."""
        key = threads, rows, columns
        if key not in self.workspaces:
            most = int((self.cu_seqlens[1:] - self.roots - 1).max())
            shapes = (threads, max(1, most), rows, columns), (threads, 2, columns)
            self.workspaces[key] = tuple(np.empty(shape, np.float32) for shape in shapes)
        found: tuple[Any, Any] = self.workspaces[key]
        return found


class HostScan(Scan):
    """One call of a mixer.

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
