"""What a strategy is: structural protocols and the feedback that drafters get.

A third party implements these without importing them; see `registry` for how one is found.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from draftwood_strategies.arrays import Float32Array, Int32Array, segment_indices

if TYPE_CHECKING:
    from draftwood_strategies.draft import DraftTree, DraftTrees
    from draftwood_strategies.successors import SuccessorTable


@dataclass(frozen=True, slots=True)
class Feedback:
    """The model's predictions at every node of a verified tree, at rejected ones too.

    Node 0 is the sequence's last committed token; node i + 1 is node i of the draft tree.

    Attributes:
        tokens: int32[m], the token at each node.
        parents: int32[m], each node's parent in this numbering; -1 for node 0.
        predictions: int32[m], the model's most probable token after each node.
        top_tokens: int32[m, k], its k most probable ones, best first, for a strategy with `top_k` above 0; None
            otherwise.

    Further attributes may be added behind these, always with None as their default: the logits or probabilities of
    `top_tokens`, say, which a strategy would ask for by an attribute of its own as it does by `top_k`. So drafters read
    attributes by name, and make a `Feedback` by keyword; one that does neither need nor get more works on unchanged.
    """

    tokens: Int32Array
    parents: Int32Array
    predictions: Int32Array
    top_tokens: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class StepFeedback:
    """The `Feedback` of several sequences of a step in flat arrays, one tree after the other.

    Attributes:
        tokens, parents, predictions, top_tokens: as in `Feedback`; parents are counted from the beginning of their
            tree. `top_tokens` may have more columns than the strategy's `top_k`.
        offsets: int32[s + 1]; the nodes of tree i, its node 0 first, are `offsets[i]` to `offsets[i + 1]`.
    """

    tokens: Int32Array
    parents: Int32Array
    predictions: Int32Array
    top_tokens: Int32Array | None
    offsets: Int32Array

    @classmethod
    def of(cls, feedback: Feedback) -> StepFeedback:
        """That of a single sequence."""
        offsets = np.array([0, feedback.tokens.shape[0]], np.int32)
        return cls(feedback.tokens, feedback.parents, feedback.predictions, feedback.top_tokens, offsets)

    def of_row(self, sequence: int) -> slice:
        """Where the nodes of a sequence are."""
        return slice(int(self.offsets[sequence]), int(self.offsets[sequence + 1]))

    def part(self, sequences: SequenceOf[int]) -> StepFeedback:
        """That of some of the sequences, at least one."""
        nodes, offsets = segment_indices(self.offsets, sequences)
        top_tokens = None if self.top_tokens is None else self.top_tokens[nodes]
        return StepFeedback(self.tokens[nodes], self.parents[nodes], self.predictions[nodes], top_tokens, offsets)

    def feedback(self, sequence: int, top_k: int) -> Feedback:
        """That of one sequence, for a strategy with this `top_k`."""
        nodes, top_tokens = self.of_row(sequence), None
        if top_k and self.top_tokens is not None:
            top_tokens = np.ascontiguousarray(self.top_tokens[nodes, :top_k])
        return Feedback(
            tokens=self.tokens[nodes],
            parents=self.parents[nodes],
            predictions=self.predictions[nodes],
            top_tokens=top_tokens,
        )


@runtime_checkable
class Drafter(Protocol):
    """Drafts for one live sequence. Called from one thread only."""

    def propose(self, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes (budget >= 1); an empty one if there is nothing to draft.

        Called again without an `observe` in between if the step of the tree was not computed or its result is not used:
        the device had no memory for it, or the sequence lost its slot. Then that tree counts for nothing.
        """

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        """The sequence grew by `accepted`, int32[a] with a >= 1: draft tokens and the model's own last one.

        `feedback` belongs to the tree of the latest step, also when that tree was empty or pruned; None where
        `accepted` was written in steps without a draft, since drafts had not paid.
        """

    def close(self) -> None:
        """The sequence ended, in whatever way. Called once."""


@runtime_checkable
class PromptIndexer(Protocol):
    """What a drafter offers besides that indexes its prompt: it does so in pieces, so that a long prompt holds up no
    step of the other sequences."""

    def index_prompt(self, max_tokens: int) -> int:
        """Indexes the next tokens of the prompt, `max_tokens` at most (max_tokens >= 1); fewer only at its end.

        Called once or more before the first `propose`, until it has indexed fewer than `max_tokens`. If `propose` is
        called before that, it indexes the rest first; `observe` and `close` do not.

        Returns:
            How many tokens that were. One that is written into several indexes counts for each.
        """


class DeviceTrees(Protocol):
    """Draft trees of d sequences, of at most n nodes each, on a device.

    Attributes:
        tokens, parents: int32[d, n]; a parent is a node of the same tree and comes before it, -1 for the root.
        scores: float32[d, n], as of `DraftTree`.
        counts: int32[d], nodes.
    """

    @property
    def tokens(self) -> Any: ...
    @property
    def parents(self) -> Any: ...
    @property
    def scores(self) -> Any: ...
    @property
    def counts(self) -> Any: ...


class WrittenOnDevice(Protocol):
    """What the s rows of a step write and verify, on a device.

    Attributes:
        tokens, counts: int32[s, n] and int32[s]: of each row the accepted nodes and the token after them, and how many
            nodes these are.
        nodes, parents, top_tokens: int32[m], int32[m] and int32[m, k >= WIDTH]: the tokens of the verified trees, node
            0 first, of each its parent among the m, -1 for none, and the most probable tokens after it. Nodes without a
            parent other than node 0 are padding.
        offsets: int32[s + 1], where each tree begins.
    """

    @property
    def tokens(self) -> Any: ...
    @property
    def counts(self) -> Any: ...
    @property
    def nodes(self) -> Any: ...
    @property
    def parents(self) -> Any: ...
    @property
    def top_tokens(self) -> Any: ...
    @property
    def offsets(self) -> Any: ...


class FollowedDevice(Protocol):
    """A device that drafts from what a step writes there while the host does not know it."""

    def follow(
        self, rows: Int32Array, sources: Int32Array, budgets: Int32Array, written: WrittenOnDevice
    ) -> DeviceTrees:
        """Learns what a step writes and drafts behind it, after all that was queued, and before what will be.

        Args:
            rows: int32[d], of drafters, each once.
            sources: int32[d], the row of each in the step.
            budgets: int32[d], the most nodes of each draft.
            written: by the step, whose rows all decode.
        """


@runtime_checkable
class DeviceDrafter(Protocol):
    """What a drafter is besides that can draft behind a step in flight.

    Attributes:
        row: on its device; None while it drafts nothing there.
        device: that it drafts on.
    """

    row: int | None
    device: FollowedDevice

    def keep(self, written: Int32Array) -> bool:
        """What `FollowedDevice.follow` learned, int32[n], is known to the host."""


class SourceCounts(NamedTuple):
    """How many of a strategy's nodes were verified, and how many of them were accepted."""

    verified: int
    accepted: int

    @staticmethod
    def summed(parts: Iterable[Mapping[str, SourceCounts]]) -> dict[str, SourceCounts]:
        """The counts of each source, summed over `parts`."""
        total: dict[str, SourceCounts] = {}
        for name, (verified, accepted) in (pair for part in parts for pair in part.items()):
            before = total.get(name, SourceCounts(0, 0))
            total[name] = SourceCounts(before.verified + verified, before.accepted + accepted)
        return total


@dataclass(slots=True)
class DraftStats:
    """What drafting did for a sequence. Times in seconds, those of tokens on the clock of `time.perf_counter`.

    Attributes:
        first_token_at, last_token_at: the ends of the first and of the latest step that wrote tokens.
        decode_steps: steps that wrote tokens.
        proposed_tokens: draft tokens that the strategy proposed.
        drafts: steps with draft tokens.
        draft_tokens: draft tokens that were verified, those that a grammar forces included.
        accepted_by_depth: for each depth of the draft tree, in how many steps a node of it was accepted.
        draft_seconds: time in the drafter.
        suspensions: how often drafting, or a part of it, was suspended since it took longer than it saved.
        drafting_disabled_reason: why drafting was switched off; "" while it is on.
        no_draft: once it has ended, why its last step had no draft, see `NoDraft`; "" if it had one or wanted none.
        by_source: verified and accepted draft tokens by source, for a strategy that combines several.
    """

    first_token_at: float = 0.0
    last_token_at: float = 0.0
    decode_steps: int = 0
    proposed_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    suspensions: int = 0
    drafting_disabled_reason: str = ""
    no_draft: str = ""
    by_source: dict[str, SourceCounts] = field(default_factory=dict)

    def record_step(self, drafted: int, accepted: int, now: float) -> None:
        """Counts a step that wrote tokens, verified `drafted` draft tokens and accepted some of them."""
        if self.decode_steps == 0:
            self.first_token_at = now
        self.last_token_at = now
        self.decode_steps += 1
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_by_depth.extend([0] * (accepted - len(self.accepted_by_depth)))
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1


@runtime_checkable
class Composite(Protocol):
    """What a drafter that is made of others' offers besides, so that one part's fault costs that part alone."""

    @property
    def by_source(self) -> Mapping[str, SourceCounts]:
        """By the name of the strategy that raised the node's probability most."""

    def limit_tokens(self, vocab_size: int) -> None:
        """Called before the first draft: a part that drafts a token of `vocab_size` or above is at fault."""

    def drop_slowest(self) -> str:
        """Called after a call that took too long: drops the slowest part for the rest of the sequence. Returns its
        name, "" if there is no part to drop."""

    def suspend_slowest(self) -> bool:
        """Called while drafts take longer than they save: leaves out the slowest part for some drafts, of all sequences
        of the strategy. Returns False if no part can be spared; then nothing is drafted for a while."""


@runtime_checkable
class Strategy(Protocol):
    """Drafts for one tenant: holds what its sequences share, and starts a drafter for each.

    `start` and all its drafters are called from one thread.
    """

    @property
    def top_k(self) -> int:
        """How many of the model's most probable tokens its drafters get at each node; 0 for none."""

    def start(self, prompt: Int32Array) -> Drafter:
        """A drafter for a sequence that begins with `prompt`, int32[p] with p >= 1."""


@runtime_checkable
class BatchStrategy(Strategy, Protocol):
    """What a strategy offers besides so that all sequences of a step are one call, which costs less than one for each.

    A strategy without it is asked sequence by sequence. The drafters are those that its `start` returned, each at most
    once in a call.
    """

    def propose_all(self, drafters: SequenceOf[Any], budgets: Int32Array) -> DraftTrees:
        """For each drafter what its `propose` returns.

        Args:
            budgets: int32[s], the most nodes of each tree, 1 or more.
        """

    def observe_all(
        self, drafters: SequenceOf[Any], accepted: Int32Array, offsets: Int32Array, feedback: StepFeedback | None
    ) -> None:
        """For each drafter what its `observe` does, in this order.

        Args:
            accepted: int32[a], what all sequences wrote, one after the other.
            offsets: int32[s + 1]; sequence i wrote `accepted[offsets[i] : offsets[i + 1]]`, at least one token.
        """


@runtime_checkable
class SupportsReadOnly(Protocol):
    """What a strategy offers besides for requests that nothing may be learned from."""

    def start_read_only(self, prompt: Int32Array) -> Drafter:
        """As `Strategy.start`, of a drafter that changes nothing of what sequences share."""


@runtime_checkable
class SupportsRebuild(Protocol):
    """What a strategy offers besides so that its memory of texts can be built anew, without those that are too old."""

    def keep_learned(self, earlier: Any) -> None:
        """Called before its first drafter is started and before it learns a text: shares with `earlier`, another
        instance with the same options, what that has learned besides texts, such as weights. Live sequences go on
        with `earlier`, so both may be used from now on, by the same thread."""


@runtime_checkable
class SuccessorSource(Strategy, Protocol):
    """What a strategy offers besides to be a hybrid's successor table, looked up at every node of the mixed tree.

    Its drafters are not started there. Its `top_k` is at least `draftwood_strategies.successors.WIDTH`.
    """

    @property
    def successors(self) -> SuccessorTable:
        """The tenant's table, the same object from its first drafter on."""


@runtime_checkable
class BacksOff(Protocol):
    """A strategy that backs off to unconditional tokens where it knows nothing of the context, as n-gram models do."""

    backs_off: bool
    """A hybrid sets it to False if a successor table, which knows more there, is among its sources."""


@runtime_checkable
class UsesModelTable(Protocol):
    """What a strategy offers besides to draft from what the model itself wrote for no tenant (`own_text`)."""

    def set_model_table(self, rows: Int32Array) -> None:
        """Called before its first drafter is started.

        Args:
            rows: int32[r, COLUMNS], as `SuccessorTable.rows`. All tenants read the same one, so that
                nobody may write to it.
        """


class ModelAsk(NamedTuple):
    """What a strategy asks of a model.

    Attributes:
        source: of the host, see `draftwood_strategies.model_drafts.ModelSource`.
        rows, budgets, levels, least: as for `ModelSource.draft`.
    """

    source: Any
    rows: list[Any]
    budgets: Int32Array
    levels: Int32Array
    least: Float32Array


class ModelAnswer(NamedTuple):
    """The drafts of a model, one for each row that it was asked for, and the seconds that they took together."""

    trees: DraftTrees
    seconds: float


Proposing: TypeAlias = "Generator[ModelAsk, ModelAnswer, DraftTrees]"
"""A call for drafts, which it returns in the end. It waits at each `ModelAsk` for the answer, or for the exception of a
model that failed. So one call of a model serves all strategies of a step, see `dispatch.run_together`."""


@runtime_checkable
class AsksModels(Protocol):
    """What a strategy offers besides that drafts by models which its host runs."""

    models: SequenceOf[Any]
    """Of the host, see `draftwood_strategies.model_drafts.ModelSource`."""

    def models_for(self, rows: int) -> SequenceOf[Any]:
        """Those of `models` that should read what sequences write in steps of so many rows, as their drafts may pay."""

    def propose_asking(self, drafters: SequenceOf[Any], budgets: Int32Array) -> Proposing:
        """As `BatchStrategy.propose_all`."""


@runtime_checkable
class DraftsForRow(Protocol):
    """What a drafter offers besides that needs to know which row of its host it drafts for."""

    def follow_row(self, row: Any) -> None:
        """Called once it is started, before anything else.

        Args:
            row: an object of the host.
        """


@runtime_checkable
class DraftsBeside(Protocol):
    """What a strategy offers besides whose drafts cost so much that they depend on what others promise already."""

    def propose_beside(self, drafters: SequenceOf[Any], budgets: Int32Array, others: DraftTrees) -> Proposing:
        """As `AsksModels.propose_asking`.

        Args:
            others: for each drafter, what the other sources of a hybrid draft together.
        """
