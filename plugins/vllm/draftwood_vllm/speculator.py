"""All that touches vLLM's second model runner: its speculator for our drafts, in 0.26 to 0.33.

vLLM's factory, as `second_runner` wraps it, makes the speculator while the runner is being made, and the speculator
finds the runner as `proposer` finds the first one. It sees which requests come and go by wrapping two methods of that
runner. All tensors stay on the device: the host never waits for it, so vLLM schedules the next step meanwhile.

Each rank of tensor parallelism has the same drafts: its arena learned the same tokens. What comes from outside enters
in the same step everywhere: in steps with new requests, and every `_SHARED_STEPS`, the first rank tells the others how
requests are drafted for, and what the store has brought.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import distributed
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from draftwood_memory.records import Int32Array
from draftwood_memory.settings import read_environment
from draftwood_tenants.engines import show_failure
from draftwood_vllm import device_support
from draftwood_vllm.device_drafts import (
    Decision,
    DeviceDrafts,
    DraftSizes,
    Joined,
    Load,
    Purge,
    RowStates,
    StepDrafts,
    warm_up,
)
from draftwood_vllm.device_memory import Arrival, DeviceMemory
from draftwood_vllm.device_support import STRATEGY
from draftwood_vllm.hosts import Binding, served_model, share_log, vllm_version
from draftwood_vllm.opening import open_device_memory

if TYPE_CHECKING:
    from draftwood_strategies.device.trie import DeviceTrie
    from draftwood_tenants.engines import Opened

_log = logging.getLogger("draftwood")

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_SHARED_STEPS = 64
"""A purge, or what another replica learned, reaches several ranks this many steps later at most. Not tuned."""
_WARM_UP = ("_warmup_", "_v2_mixed_warmup", "_dummy_req_")
"""How the ids of vLLM's own requests begin."""

ResultT = TypeVar("ResultT")
ValueT = TypeVar("ValueT")


class RunnerDrafts:
    """Our drafts for a model runner: they follow its requests, and are off after a failure.

    Args:
        vllm_config: vLLM's configuration.
        device: that the runner's tensors are on.
    """

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        share_log()
        self._config = vllm_config
        self._device = device
        self._longest = int(vllm_config.speculative_config.num_speculative_tokens)
        self._runner: Any = None
        self._drafts: DeviceDrafts | None = None
        self._opened: Opened[DeviceMemory] | None = None
        self._ranks = _Ranks()
        self._steps = 0
        self._untold = False

    def expect_runner(self, stored: object) -> None:
        """Lets the runner that is being made, and stores this speculator, be the one that drafts are for."""
        try:
            Binding.expect(_RUNNER, "speculator", self, stored)
        except Exception as error:
            self._switch_off(f"it cannot be bound to the model runner: {error}", error)

    def bind(self, runner: Any) -> None:
        """Called once, with the model runner that drafts are for, while it is being made."""
        self._runner = runner
        load_model, add, finish = runner.load_model, runner.add_requests, runner.finish_requests

        def loads(*args: Any, **kwargs: Any) -> Any:
            result = load_model(*args, **kwargs)
            self._open()
            return result

        def adds(scheduler_output: Any) -> None:
            add(scheduler_output)
            self._attempt(lambda drafts: self._added(drafts, scheduler_output))

        def finishes(scheduler_output: Any) -> None:
            finish(scheduler_output)
            self._attempt(lambda drafts: self._finished(drafts, scheduler_output))

        runner.load_model, runner.add_requests, runner.finish_requests = loads, adds, finishes

    def _open(self) -> None:
        """Makes the arena, once the model is loaded, and opens the memory on the rank that leads."""
        if self._drafts is not None or self._runner is None:
            return
        self._ranks = _Ranks(get_tp_group())
        problem, drafts = "", None
        try:
            fields = device_support.sizes_of(self._config, read_environment(os.environ, strategy=STRATEGY))
            drafts = self._arena(fields)
            if self._ranks.leads:
                model = served_model(self._config)
                self._opened = open_device_memory(os.environ, model, self._device, fields["tenants"] - 1)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not self._ranks.all(not problem):
            self._switch_off(problem or "another rank cannot draft")
            return
        self._drafts = drafts
        nbytes = device_support.nbytes_of(fields)
        if hasattr(self._runner, "model_memory_usage"):  # that vLLM leaves free of the KV cache
            self._runner.model_memory_usage += nbytes
        _log.info("drafts on the device take %.0f MiB: %s", nbytes / 2**20, device_support.shown(fields))

    def _arena(self, fields: Mapping[str, int]) -> DeviceDrafts:
        """Raises ImportError, ValueError: there are no drafts for this device, or not enough of its memory."""
        device = device_support.load()
        sizes = device.sizes(**fields)
        try:
            trie = device.trie(sizes, self._device)
        except (ValueError, torch.OutOfMemoryError) as error:
            raise ValueError(f"drafts for {device_support.shown(fields)} do not fit the device: {error}") from error
        warm_up(trie, self._longest, fields["depth"], self._device)
        of_runner = self._runner.req_states
        states = RowStates(of_runner.all_token_ids.gpu, of_runner.total_len.gpu, of_runner.last_sampled_tokens)
        vocab_size = int(self._config.model_config.get_vocab_size())
        of_trie = fields["row_tokens"], fields["depth"], fields["tenants"]
        return self._drafts_of(trie, states, DraftSizes(self._longest, vocab_size, *of_trie))

    def _drafts_of(self, trie: DeviceTrie, states: RowStates, sizes: DraftSizes) -> DeviceDrafts:
        return DeviceDrafts(trie, states, sizes)

    def _added(self, drafts: DeviceDrafts, output: Any) -> None:
        """Requests that join in this step, and what has come from outside."""
        new = [one for one in output.scheduled_new_reqs if _is_drafted(one)]
        self._steps += 1
        if not (self._ranks.alone or new or self._steps % _SHARED_STEPS == 0):
            return
        changes, decisions = self._ranks.shared(self._decided(new))
        for change in changes:
            drafts.apply(change)
        states = self._runner.req_states
        for one, decision in zip(new, decisions, strict=True):
            drafts.leave(one.req_id)
            state, known = states.req_id_to_index[one.req_id], len(one.prefill_token_ids)
            limit = min(int(states.max_seq_len[state]), int(self._config.model_config.max_model_len))
            drafts.join(Joined(one.req_id, state, known, limit, decision))

    def _decided(self, new: list[Any]) -> tuple[list[Load | Purge], list[Decision]]:
        """What the rank that leads has to tell. Never raises: the others wait for it."""
        if self._opened is None:
            return [], []
        try:
            memory = self._opened.drafts
            decisions = [memory.join(*_arrived(one)) for one in new]
            return memory.changes(), decisions
        except Exception:
            _log.exception("requests are not drafted for")
            return [], [Decision()] * len(new)

    def _finished(self, drafts: DeviceDrafts, output: Any) -> None:
        preempted = set(output.preempted_req_ids or ()) - set(output.finished_req_ids)
        for request_id in sorted(output.finished_req_ids):
            drafts.leave(request_id)
            if self._opened is not None:
                self._opened.drafts.end(request_id)
        for request_id in sorted(preempted):
            drafts.leave(request_id)
            if self._opened is not None:
                self._opened.drafts.preempt(request_id)

    def _tell(self, memory: DeviceMemory, request_ids: list[str], written: torch.Tensor) -> None:
        """Lets the memory have what was written. If that fails, drafting goes on, as other ranks' does."""
        try:
            memory.written(request_ids, written)
        except Exception:
            if not self._untold:
                _log.exception("from now on, what is written in some steps is learned by this process alone")
            self._untold = True

    def _attempt(self, work: Callable[[DeviceDrafts], ResultT]) -> ResultT | None:
        """What `work` returns; None without drafts. Whatever it raises switches them off.

        Raises:
            Exception: with several ranks, since others would go on with drafts that this one does not have.
        """
        if self._drafts is None:
            return None
        try:
            return work(self._drafts)
        except Exception as error:
            self._switch_off(f"{type(error).__name__}: {error}", error)
            if not self._ranks.alone:
                raise
            return None

    def _switch_off(self, reason: str, error: Exception | None = None) -> None:
        self._drafts = None
        _log.error("vLLM %s goes on without drafts of Draftwood: %s", vllm_version(), reason, exc_info=error)
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.close()
        show_failure(os.environ)


class Speculator(RunnerDrafts, BaseSpeculator):  # type: ignore[misc]
    """Drafts of ours alone, the method "custom_class".

    Attributes:
        model, supports_mm_inputs, draft_logits: as vLLM reads them of each speculator.
        enable_adaptive_verification: vLLM verifies those drafts of a batch that are worth their time.
        draft_token_confidence_probs: float32[b, k], `StepDrafts.confidences` of the latest step, if vLLM does that.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        speculative = vllm_config.speculative_config
        self.model = torch.nn.Module()
        self.enable_adaptive_verification = bool(getattr(speculative, "enable_adaptive_verification", False))
        rows = int(vllm_config.scheduler_config.max_num_seqs)
        self._tokens = torch.zeros((rows, self._longest), dtype=torch.int64, device=device)
        self.draft_token_confidence_probs = torch.zeros((rows, self._longest), dtype=torch.float32, device=device)
        self.expect_runner(self)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing of ours is captured."""

    def capture(self) -> None:
        """Nothing of ours is captured."""

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
        *_: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """int64[b, k], draft tokens for each row, all of which vLLM verifies.

        Args:
            input_batch: has `num_reqs`, b; `req_ids` of the rows; `idx_mapping`, int[b], their places in the state.
            num_sampled: int32[b], tokens that each row wrote; 0 while its prompt is not read to its end.
            last_sampled: int64[states, 1], the last token of each.
            num_speculative_tokens: places that vLLM verifies next; None for all.
        """
        count = int(input_batch.num_reqs)
        if dummy_run:
            return self._tokens[:count]
        longest = self._longest if num_speculative_tokens is None else num_speculative_tokens

        def step(drafts: DeviceDrafts) -> StepDrafts:
            return drafts.propose(input_batch.idx_mapping[:count], num_sampled[:count], longest)

        proposed = self._attempt(step)
        if proposed is None:
            self.draft_token_confidence_probs[:count].zero_()
            self._tokens[:count] = last_sampled.view(-1, 1)[input_batch.idx_mapping[:count].long()]
        else:
            if self.enable_adaptive_verification:
                self.draft_token_confidence_probs[:count] = proposed.confidences
            self._tokens[:count] = proposed.tokens
            if self._opened is not None:
                self._tell(self._opened.drafts, input_batch.req_ids[:count], proposed.written)
        return self._tokens[:count]


class _Ranks:
    """The ranks that compute one model together, which have to agree to have the same drafts.

    Args:
        group: vLLM's `GroupCoordinator`; None for a rank alone.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = None if group is None or group.world_size == 1 else group

    @property
    def alone(self) -> bool:
        return self._group is None

    @property
    def leads(self) -> bool:
        """This is the rank that decides."""
        return self._group is None or self._group.rank_in_group == 0

    def shared(self, value: ValueT) -> ValueT:
        """The value of the rank that leads. Waits for the other ranks' hosts, not for their devices."""
        shared: ValueT = value if self._group is None else self._group.broadcast_object(value, src=0)
        return shared

    def all(self, value: bool) -> bool:
        """Whether it is true on each rank. Waits as `shared` does."""
        if self._group is None:
            return value
        votes = [False] * self._group.world_size
        distributed.all_gather_object(votes, value, group=self._group.cpu_group)
        return all(votes)


def _is_drafted(request: Any) -> bool:
    """Whether it is a caller's request for text."""
    return request.sampling_params is not None and not request.req_id.startswith(_WARM_UP)


def _arrived(request: Any) -> tuple[Arrival, Int32Array]:
    """A request, and what it has written before."""
    params, known = request.sampling_params, np.array(request.prefill_token_ids, np.int32)
    prompt = len(request.prompt_token_ids or ())
    only_tokens = prompt > 0 and request.prompt_embeds is None
    stops = params.all_stop_token_ids
    read = known[:prompt] if only_tokens else None
    return Arrival(request.req_id, read, params.extra_args, stops, params.max_tokens), known[prompt:]
