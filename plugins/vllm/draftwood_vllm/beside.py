"""Our drafts beside those of a trained drafter of vLLM: each row gets per step the one that promises more.

vLLM's speculator stays what it is, and where it is; only its `propose` is wrapped. It is asked in each step, as without
us, and so is our trie. `DeviceChoice` takes for each row the draft that had more accepted where they differ. All of it
is on the device, and the host waits for nothing. If our part fails, theirs goes on alone, and the other way round.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from draftwood_strategies.device.choice import DeviceChoice
from draftwood_vllm.device_drafts import DeviceDrafts, DraftSizes, Joined, Load, Purge, RowStates, StepDrafts
from draftwood_vllm.hosts import vllm_version
from draftwood_vllm.speculator import RunnerDrafts

if TYPE_CHECKING:
    from draftwood_strategies.device.trie import DeviceTrie

_log = logging.getLogger("draftwood")

_CERTAIN = 1e30
"""A logit beside which others have no probability, at any temperature."""
_CERTAIN_IN_HALF = 6e4


class Chosen(NamedTuple):
    """The drafts of a step, on the device.

    Attributes:
        tokens: int64[b, k], each row's draft.
        ours: int32[b], how many of its tokens, the first ones, are ours.
        written: as in `StepDrafts`, with tokens that are ours as those drafted; None if nothing was drafted.
    """

    tokens: torch.Tensor
    ours: torch.Tensor
    written: torch.Tensor | None


class ChosenDrafts(DeviceDrafts):
    """Drafts of ours, and for each row the choice between ours and another.

    Each tenant has a table of its own for the choice, as long as its memory has a region, and each row without a region
    has one for its own request.

    Args:
        probabilistic: as in `DeviceChoice`.
    """

    def __init__(self, trie: DeviceTrie, states: RowStates, sizes: DraftSizes, probabilistic: bool) -> None:
        super().__init__(trie, states, sizes)
        count, self._tenants = states.tokens.shape[0], sizes.tenants
        slots, device = sizes.tenants + count, states.tokens.device
        self._choice = DeviceChoice(count, slots, sizes.longest, device, probabilistic)
        self._slots: dict[str, int] = {}  # by region; that used last at the end
        # By the host's index: the slot, and whether it learns.
        self._tables = np.zeros((2, count), np.int32)
        self._tables[0] = -1
        self._tables_on_device: torch.Tensor | None = None

    def join(self, joined: Joined) -> None:
        super().join(joined)
        state, (region, learns, nodes) = joined.state, joined.decision
        self._choice.begin(state)
        slot = self._slot_of(region) if region else None
        if slot is None:
            slot, learns = self._tenants + state, True
            self._choice.forget(slot)
        self._tables[:, state] = slot if nodes > 0 else -1, learns
        self._tables_on_device = None

    def apply(self, change: Load | Purge) -> None:
        super().apply(change)
        if isinstance(change, Purge) and change.region in self._slots:
            self._choice.forget(self._slots[change.region])

    def choose(
        self,
        indexes: torch.Tensor,
        num_sampled: torch.Tensor,
        longest: int,
        theirs: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> Chosen:
        """Learns what each row wrote, drafts for it, and chooses.

        Args:
            indexes, num_sampled, longest: as in `propose`.
            theirs: int64[b, k], of which the first `longest` are drafts.
            temperatures: float32[states].
        """
        step = self.propose(indexes, num_sampled, longest)
        tokens, taken = self._chosen(step, indexes, longest, theirs, temperatures)
        step.written[:, -1] = taken
        return Chosen(tokens, taken, step.written)

    def warm_up(self) -> None:
        """Compiles what a choice needs, with a row that has no request yet."""
        tokens = torch.zeros((1, self._longest), dtype=torch.int64, device=self._device)
        written = torch.zeros((1, self._longest + 3), dtype=torch.int32, device=self._device)
        step = StepDrafts(tokens, tokens > 0, self._out_scores[:1], written)
        temperatures = torch.zeros(self._states.lengths.shape[0], device=self._device)
        self._chosen(step, written[0, :1], self._longest, tokens, temperatures)

    def _chosen(
        self,
        step: StepDrafts,
        indexes: torch.Tensor,
        longest: int,
        theirs: torch.Tensor,
        temperatures: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DeviceChoice.choose`, after it has learned what rows wrote."""
        if self._tables_on_device is None:
            self._tables_on_device = self._on_device(self._tables)
        slots, learns = self._tables_on_device
        index, states = indexes.int(), self._states
        self._choice.grade(index, learns, states.tokens, states.lengths)
        counts = step.used.int().cumprod(1).sum(1, dtype=torch.int32)
        given = theirs.contiguous(), step.tokens, step.scores, counts, longest
        return self._choice.choose(index, slots, states.lengths, temperatures, *given)

    def _slot_of(self, region: str) -> int | None:
        """The table of a region; None if all are in use."""
        slot = self._slots.pop(region, None)
        if slot is None and len(self._slots) < self._tenants:
            slot = min({*range(self._tenants)} - {*self._slots.values()})
        elif slot is None:
            live = {one.decision.region for one in self._live.values()}
            unused = next((other for other in self._slots if other not in live), None)
            if unused is None:
                return None
            slot = self._slots.pop(unused)
            self._choice.forget(slot)
        self._slots[region] = slot
        return slot


class OneHot:
    """Lets vLLM verify tokens of ours as they were drafted: with certainty.

    Where vLLM draws its draft's tokens, it verifies each by the probability that it was drawn by. It keeps these as
    logits, of which one is raised here, until the row is drafted for again.

    Args:
        logits: [states, k, vocabulary], floating, of each row's latest draft.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self._certain = _CERTAIN if torch.finfo(logits.dtype).max > _CERTAIN else _CERTAIN_IN_HALF
        self._places = torch.arange(logits.shape[1], device=logits.device)
        self._tokens = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
        self._before = logits[..., 0].clone()

    def restore(self, indexes: torch.Tensor) -> None:
        """Rows, int[b], are about to be drafted for."""
        index = indexes.long()
        self.logits[index[:, None], self._places, self._tokens[index]] = self._before[index]

    def mark(self, indexes: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Of the tokens of rows, int64[b, k], the first `counts`, int32[b], are ours."""
        index, places = indexes.long(), self._places
        tokens = tokens.clamp(0, self.logits.shape[-1] - 1)
        before = self.logits[index[:, None], places, tokens]
        self._tokens[index], self._before[index] = tokens, before
        self.logits[index[:, None], places, tokens] = before.masked_fill(places < counts[:, None], self._certain)


class Beside(RunnerDrafts):
    """Our drafts beside a speculator of vLLM, whose `propose` asks both from now on.

    Args:
        theirs: vLLM's speculator, which the runner gets.
    """

    def __init__(self, vllm_config: Any, device: torch.device, theirs: Any) -> None:
        super().__init__(vllm_config, device)
        self._propose = theirs.propose
        self._failed = False
        logits = getattr(theirs, "draft_logits", None)
        self._one_hot = None if logits is None else OneHot(logits)
        theirs.propose = self.propose
        self.expect_runner(theirs)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: Any,
        temperature: torch.Tensor,
        *others: Any,
        **options: Any,
    ) -> torch.Tensor:
        """int64[b, k], draft tokens for each row; arguments as those of vLLM's `BaseSpeculator.propose`."""
        batch = (input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states)
        given = (*batch, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, *others)
        if options.get("dummy_run"):
            return self._propose(*given, **options)  # type: ignore[no-any-return]
        count = int(input_batch.num_reqs)
        indexes, wrote = input_batch.idx_mapping[:count], num_sampled[:count]
        if self._one_hot is not None:
            self._one_hot.restore(indexes)
        if self._drafts is None and not self._failed:
            return self._propose(*given, **options)  # type: ignore[no-any-return]
        theirs = self._asked(given, options)
        most = options.get("num_speculative_tokens")
        longest = self._longest if most is None else int(most)

        def step(drafts: DeviceDrafts) -> Chosen:
            assert isinstance(drafts, ChosenDrafts)
            if theirs is not None:
                return drafts.choose(indexes, wrote, longest, theirs, temperature)
            alone = drafts.propose(indexes, wrote, longest)
            return Chosen(alone.tokens, torch.full_like(wrote, self._longest), alone.written)

        chosen = self._attempt(step)
        if chosen is None and theirs is not None:
            return theirs
        if chosen is None:  # both have failed
            last = last_sampled.view(-1, 1)[indexes.long()].repeat(1, self._longest)
            chosen = Chosen(last, torch.full_like(wrote, self._longest), None)
        if self._one_hot is not None:
            self._one_hot.mark(indexes, chosen.tokens, chosen.ours)
        if self._opened is not None and chosen.written is not None:
            self._tell(self._opened.drafts, input_batch.req_ids[:count], chosen.written)
        return chosen.tokens

    def _drafts_of(self, trie: DeviceTrie, states: RowStates, sizes: DraftSizes) -> DeviceDrafts:
        probabilistic = self._one_hot is not None
        if self._one_hot is not None:  # vLLM verifies tokens of its draft's vocabulary alone
            sizes = sizes._replace(vocab_size=min(sizes.vocab_size, self._one_hot.logits.shape[-1]))
        drafts = ChosenDrafts(trie, states, sizes, probabilistic)
        drafts.warm_up()
        return drafts

    def _asked(self, given: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor | None:
        """Their drafts; None from their first failure on.

        Raises:
            Exception: with several ranks, which would wait for this one.
        """
        if self._failed:
            return None
        try:
            drafts: torch.Tensor = self._propose(*given, **options)
            return drafts
        except Exception:
            if not self._ranks.alone or self._config.parallel_config.data_parallel_size > 1:
                raise
            self._failed = True
            _log.exception("vLLM %s goes on without its own drafts, with those of Draftwood alone", vllm_version())
            return None
