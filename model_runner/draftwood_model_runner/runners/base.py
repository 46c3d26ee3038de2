"""The interface between the engine and whatever computes a step: a batch of plain arrays in, predictions out.

A runner owns the model's weights and the memory of the KV cache. It knows nothing of requests, strategies and
scheduling; engine, scheduler and drafting know nothing of torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from draftwood_model_runner.errors import DeviceMemoryError, ModelError
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath, verify
from draftwood_model_runner.sequence import StateUse
from draftwood_strategies.arrays import Float32Array, Int32Array, segment_sizes
from draftwood_strategies.base import DeviceTrees, StepFeedback, WrittenOnDevice


class DraftLimits(NamedTuple):
    """What draft trees a runner can verify.

    Attributes:
        max_depth: nodes of a path at most.
        max_nodes: nodes of a tree at most.
        branches: False for chains only.
    """

    max_depth: int = sys.maxsize
    max_nodes: int = sys.maxsize
    branches: bool = True


NO_LIMITS = DraftLimits()


class KVShape(NamedTuple):
    """Shape of the keys and values of one token in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


class Trees(NamedTuple):
    """The draft trees of a step, each with its root, which is node 0.

    Attributes:
        tokens, parents: int32[R]; parents are counted from the beginning of their tree, -1 for node 0.
        offsets: int32[S + 1]; the nodes of batch row s are `offsets[s]` to `offsets[s + 1]`.
    """

    tokens: Int32Array
    parents: Int32Array
    offsets: Int32Array


@dataclass(frozen=True, eq=False, slots=True)
class StepBatch:
    """The flat batch of one forward pass: the tokens of all batch rows, one row after the other.

    A batch row is the part of one sequence in the step: a run of T_s tokens that form a tree under its context, the
    tokens that are committed. Prefill is a chain; decoding is a chain of one, the last token, with the draft tree under
    it. There is no prefill mode. The arrays hold no Python objects, so that a runner can copy them into static buffers
    or broadcast them.

    Attributes:
        tokens: int32[T].
        positions: int32[T], absolute.
        parents: int32[T], the token that each one follows, counted from the beginning of its batch row; always
            earlier than the token itself, -1 for the end of the context. A token attends to the context of its row, to
            its ancestors and to itself: the ancestor mask is the transitive closure of `parents`, which each runner
            builds in the form that its kernel takes.
        cu_seqlens: int32[S + 1]; the tokens of batch row s are `cu_seqlens[s]` to `cu_seqlens[s + 1]`.
        context_lens: int32[S], committed tokens; the i-th token of a row is entry `context_lens[s] + i` of its KV
            cache.
        block_table: int32[P], the pages of all rows, one row after the other: entry e of the KV cache of a batch row is
            in slot e % page_size of its page number e // page_size. A row may have more pages than the step needs,
            and -1 for pages behind the window, see `RunnerFactory.window`.
        cu_blocks: int32[S + 1]; the pages of batch row s are from `cu_blocks[s]` to `cu_blocks[s + 1]`.
        logit_rows: int32[R], the tokens that need logits, ascending.
        is_dummy: the contexts were never computed: only the time of the step matters, and no state of it is kept.
        prompt_lens: int32[S], of each sequence, how many of its tokens are its prompt; None: all but drafts are.
        exact_top_k: how many of the greatest logits of each row must be the model's own. Others may be off, by less
            than it takes to be among them. None: all must be its own.
        features: float32[T, f], what a draft head reads of each token; None for a whole model.
        reads_features: what a draft head reads of the model's hidden states is asked for, if the model shows it.
    """

    tokens: Int32Array
    positions: Int32Array
    parents: Int32Array
    cu_seqlens: Int32Array
    context_lens: Int32Array
    block_table: Int32Array
    cu_blocks: Int32Array
    logit_rows: Int32Array
    is_dummy: bool = False
    prompt_lens: Int32Array | None = None
    exact_top_k: int | None = None
    features: Float32Array | None = None
    reads_features: bool = True

    @property
    def size(self) -> int:
        """T, tokens of all batch rows."""
        return int(self.tokens.shape[0])

    @property
    def rows(self) -> int:
        """S, the number of batch rows."""
        return int(self.context_lens.shape[0])

    def slot_mapping(self, page_size: int) -> npt.NDArray[np.int64]:
        """int64[T]: where the keys and values of each token go: page * page_size + slot in the page."""
        sizes = segment_sizes(self.cu_seqlens)
        entries = np.arange(self.size) + np.repeat(self.context_lens - self.cu_seqlens[:-1], sizes)
        pages = self.block_table[entries // page_size + np.repeat(self.cu_blocks[:-1], sizes)]
        return pages.astype(np.int64) * page_size + entries % page_size

    def feedback(self, tokens: Int32Array, top_tokens: Int32Array | None) -> StepFeedback:
        """What a model predicts at the nodes of all draft trees.

        Args:
            tokens: int32[R], the most probable token after each node.
            top_tokens: int32[R, k], or None.
        """
        trees = self.trees
        return StepFeedback(trees.tokens, trees.parents, tokens, top_tokens, trees.offsets)

    @property
    def trees(self) -> Trees:
        """The draft trees: of each batch row the first token that needs logits, which is node 0, and those behind."""
        if self.logit_rows.shape[0] == self.size:
            return Trees(self.tokens, self.parents, self.cu_seqlens)
        if not self.logit_rows.size:
            return Trees(self.logit_rows, self.logit_rows, np.zeros_like(self.cu_seqlens))
        offsets = np.searchsorted(self.logit_rows, self.cu_seqlens).astype(np.int32)
        roots = self.logit_rows[np.minimum(offsets[:-1], self.logit_rows.shape[0] - 1)] - self.cu_seqlens[:-1]
        parents = self.parents[self.logit_rows] - np.repeat(roots, segment_sizes(offsets))
        return Trees(self.tokens[self.logit_rows], parents, offsets)

    @property
    def mean_context(self) -> int:
        """Committed tokens that a token of the step attends to, on average over the tokens."""
        if self.rows == 1:
            return int(self.context_lens[0])
        return int(self.context_lens @ segment_sizes(self.cu_seqlens)) // self.size


class Predictions(NamedTuple):
    """What the model predicts after each token that needs logits.

    Attributes:
        logits: [R, vocab], an array of the runner.
        tokens: int32[R], the most probable token; of equally probable ones that with the lowest id.
        top_tokens: int32[R, k], the k most probable tokens by these logits, best first, and of equally probable ones
            that with the lowest id; None for k = 0.
        features: float32[T, f], of all tokens of the step, the hidden states that draft heads read, see
            `loading.loaded.adopt`. Of a head float32[R, d], what it hands on behind each token that needs logits. Lasts
            until the next step. None if there are none, or they are not asked for. `Runner.step` returns them on the
            host.
    """

    logits: Any
    tokens: Int32Array
    top_tokens: Int32Array | None
    features: Any = None


class HeadParts(NamedTuple):
    """What a head needs beside its runner.

    Attributes:
        combine: float32[n, d], what it reads of the target's features, pieces of [n, f] together, of
            `StepInFlight.features` or of `Predictions.features`.
        embed: float32[n, d], the embeddings of int32[n] tokens; None if its runner has them.
        token_ids: int32[v], the target's token for each of the head's.
        width: d, of a hidden state.
    """

    combine: Callable[[SequenceOf[Any]], Float32Array]
    embed: Callable[[Int32Array], Float32Array] | None
    token_ids: Int32Array
    width: int


class KVCompaction(NamedTuple):
    """Keys and values of accepted draft tokens that move to their final place, in every layer.

    `targets` ascend within a sequence, and no slot is a target before it was read as a source.

    Attributes:
        sources, targets: int32[m], slots: page * page_size + slot in the page.
        offsets: int32[n + 1]; the moves of the i-th sequence that has any are `offsets[i]` to `offsets[i + 1]`.
    """

    sources: Int32Array
    targets: Int32Array
    offsets: Int32Array


class StepInFlight(Protocol):
    """A step that has begun."""

    @property
    def can_overlap(self) -> bool:
        """Whether another step may begin before this one ends."""

    @property
    def scores(self) -> Float32Array:
        """float32[n], of the nodes of all drafts that the device made, once the step was waited for, see `Following`;
        none of other drafts."""

    @property
    def features(self) -> Any:
        """As in `Predictions`, once the step was waited for, but an array of the runner, that may be on its device and
        lasts as long as this."""

    def wait(self) -> tuple[StepFeedback, float]:
        """What it predicts at the nodes of all draft trees, once it is computed, and the seconds that the device took.

        To be called once, before `verify` and before a step that begins later is waited for.

        Raises:
            DeviceMemoryError, DeviceLostError: as `Runner.step`.
        """

    def verify(self, rows: SequenceOf[int]) -> list[AcceptedPath]:
        """The accepted paths of some batch rows, none of them without a sampler, see `sampling.metadata`.

        Their samplers accept the tokens, and their keys and values lie behind the committed ones, one after the
        other. A row that is left out is as if the step had not been. To be called once at most.

        Raises:
            ModelError: the device had no memory to move keys and values: no sequence can go on.
            DeviceLostError: the device computes nothing more for this process.
        """


class Runner(Protocol):
    """Computes steps of one model. All calls come from one thread."""

    @property
    def pages(self) -> int:
        """Pages of its KV memory, all of which it has from the beginning."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether its device computes a step while the host does something else, as a GPU."""

    @property
    def mixed_batches(self) -> bool:
        """Whether decoding sequences add next to nothing to a step that reads a prompt, as on a GPU. If not, they skip
        some of these steps, and draft in none."""

    def draft_limits(self, position: int) -> DraftLimits:
        """What draft tree can be verified under the token at `position`."""

    def step(self, batch: StepBatch, top_k: int) -> Predictions:
        """One forward pass; writes the keys and values of all its tokens.

        Args:
            top_k: how many most probable tokens to return for each row of logits, at least.

        Raises:
            DeviceMemoryError: the device had no memory for it; nothing was written, and a smaller step may fit.
            DeviceLostError: the device computes nothing more for this process.
        """

    def begin(self, batch: StepBatch, top_k: int, samplers: SequenceOf[TokenSampler | None]) -> StepInFlight:
        """Begins a forward pass whose draft trees are verified. If it is asynchronous, one step may follow another that
        is in flight, no third one.

        Args:
            samplers: of each batch row; None for one that writes nothing, since its prompt goes on.

        Raises:
            DeviceMemoryError, DeviceLostError: as `step`.
        """

    def compact_kv(self, moves: KVCompaction) -> None:
        """Moves keys and values of accepted draft tokens behind the committed ones.

        Raises:
            DeviceLostError: as `step`.
            DeviceMemoryError: the device had no memory for it; they may have been moved in part.
        """


class Following(NamedTuple):
    """A step that begins behind one that is in flight, and goes on with what that one writes.

    Attributes:
        sources: int32[S], of each batch row its row in the step in flight.
        drafted: int32[S], the number of its draft; negative for none.
        draft: called with what the step in flight writes. Queues on the device what makes the drafts, and does not
            wait. None for no drafts.
    """

    sources: Int32Array
    drafted: Int32Array
    draft: Callable[[WrittenOnDevice], DeviceTrees] | None


@runtime_checkable
class FollowedRunner(Runner, Protocol):
    """A runner whose steps may go on with what is still computed."""

    @property
    def follows(self) -> bool:
        """Whether `follow` may be called for this model."""

    def follow(
        self, earlier: StepInFlight, following: Following, batch: StepBatch, samplers: SequenceOf[TokenSampler | None]
    ) -> StepInFlight:
        """Begins a step of rows that decode, while `earlier` is in flight, whose `can_overlap` is true.

        Args:
            batch: laid out behind the longest context that each row may have, with as many nodes as its draft may have;
                their tokens and parents are not read.
            samplers: of each row; its next token depends on nothing that `earlier` writes but the position.

        Raises:
            DeviceMemoryError, DeviceLostError: as `step`.
        """


class PageStates(Protocol):
    """What a runner keeps of sequences besides keys and values: the states of recurrent layers.

    A sequence can begin after a cached prefix only where the state after it was kept, at the end of a page.
    """

    @property
    def sequences(self) -> int:
        """Live ones that there is memory for."""

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes that each of them needs in a step."""

    @property
    def use(self) -> StateUse:
        """Now."""

    def resumes_after(self, page: int) -> bool:
        """Whether the state after the last token of a page is known."""

    def resume(self, after: int, first: int, position: int) -> None:
        """A sequence begins with `position` tokens, the last in page `after`; what it writes begins in page `first`."""

    def release(self, pages: Iterable[int], *, kept: bool) -> None:
        """No live sequence holds these pages any more; if `kept`, others may begin after them."""


@runtime_checkable
class StatefulRunner(Runner, Protocol):
    """A runner whose model may have recurrent layers."""

    @property
    def states(self) -> PageStates | None:
        """None if it has none."""


class RunnerFactory(Protocol):
    """A model in the form that one kind of runner computes, before KV memory is allocated."""

    @property
    def name(self) -> str:
        """The kind of runner: "cuda", "openvino" or "torch"."""

    @property
    def exact(self) -> bool:
        """Outputs are bit-identical with and without drafts, in any batch."""

    @property
    def window(self) -> int | None:
        """Entries of a sequence that its next tokens need at most, the last ones: its runners are given page tables
        with -1 for pages that lie behind. None for all."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        """KV capacity for `sequences` contexts of so many tokens, or for as many as the free memory allows.

        Raises:
            InvalidValueError: not even one fits.
        """

    def runner(self, kv_tokens: int, threads: int | None = None, sequences: int | None = None) -> Runner:
        """A runner with KV memory of its own.

        Args:
            kv_tokens: capacity of its KV memory, rounded up to full pages.
            threads: CPU threads of a step; None for the default of torch.
            sequences: that run at once at most, for states of recurrent layers that are allocated at once; None for the
                runner's default.

        Raises:
            InvalidValueError: the device has no memory for it.
        """


class HostStep:
    """Implements `runners.base.StepInFlight` for a runner that is not asynchronous.

    Args:
        batch, top_k, samplers: as for `Runner.begin`.
        threads: that verify, at most.
    """

    can_overlap: ClassVar[bool] = False
    scores: ClassVar[Float32Array] = np.zeros(0, np.float32)

    def __init__(
        self, runner: Runner, batch: StepBatch, top_k: int, samplers: SequenceOf[TokenSampler | None], threads: int
    ) -> None:
        started = time.perf_counter()
        self._logits, tokens, top_tokens, self.features = runner.step(batch, top_k)
        self._seconds = time.perf_counter() - started
        self._feedback = batch.feedback(tokens, top_tokens)
        self._runner, self._batch, self._samplers, self._threads = runner, batch, samplers, threads

    def wait(self) -> tuple[StepFeedback, float]:
        return self._feedback, self._seconds

    def verify(self, rows: SequenceOf[int]) -> list[AcceptedPath]:
        paths = verify(self._samplers, self._feedback, self._logits, rows, self._threads)
        compact(self._runner, self._batch, dict(zip(rows, paths, strict=True)))
        return paths


def compact(runner: Runner, batch: StepBatch, paths: dict[int, AcceptedPath]) -> None:
    """Moves keys and values of accepted paths, by batch row, behind the committed ones.

    Raises:
        ModelError: the device had no memory for it. No smaller step helps: what was accepted is not where it belongs.
        DeviceLostError: as `Runner.compact_kv`.
    """
    moving = {row: path.nodes for row, path in paths.items() if path.nodes and path.nodes[-1] >= len(path.nodes)}
    if not moving:
        return  # they are there
    slots = batch.slot_mapping(runner.page_size)
    sources, targets, offsets = list[int](), list[int](), [0]
    for row, nodes in moving.items():
        first = int(np.searchsorted(batch.logit_rows, batch.cu_seqlens[row]))
        draft = slots[int(batch.logit_rows[first]) + 1 : int(batch.cu_seqlens[row + 1])].tolist()
        for depth, node in enumerate(nodes):
            if node != depth:
                sources.append(draft[node])
                targets.append(draft[depth])
        offsets.append(len(sources))
    try:
        runner.compact_kv(KVCompaction(*(np.array(part, np.int32) for part in (sources, targets, offsets))))
    except DeviceMemoryError as error:
        raise ModelError(str(error)) from error
