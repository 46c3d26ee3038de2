"""All that touches vLLM's first model runner: its proposer for the method "custom_class", in 0.32.

vLLM makes the proposer while it makes a model runner, and asks it for drafts after each step, without saying which
requests the rows are. The runner knows: it has `requests` and `input_batch`. The proposer learns of its runner at the
moment in which vLLM stores the proposer in it, see `Binding`. Whatever is missing or fails, vLLM goes on without
drafts, and one line of its log says why. Nothing but the standard library is imported before the model is loaded: vLLM
imports this in processes that do not draft, and its CPU build looks into all modules as it starts, which cffi's break.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from draftwood_vllm.cpu_kernels import repair
from draftwood_vllm.hosts import Binding, served_model, share_log, vllm_version
from draftwood_vllm.second_runner import enable, lacking, say_first_runner
from draftwood_vllm.service_link import end_with_service

if TYPE_CHECKING:
    from draftwood_memory.engines.session import Row
    from draftwood_tenants.engines import OpenedDrafts

_log = logging.getLogger("draftwood")

NEEDED = "0.32"
"""The oldest version of vLLM that this was tried with."""
_FACTORY = "vllm.v1.spec_decode.custom_class_proposer"
_RUNNER = "vllm.v1.worker.gpu_model_runner"


def check() -> None:
    """Called by vLLM in each of its processes (`vllm.general_plugins`): shows metrics, or logs what this version lacks.

    Never raises.
    """
    try:
        end_with_service(os.environ)
        if find_spec(_FACTORY) is None:
            lacks = "has no speculative method custom_class"
            _log.warning("draftwood-vllm: vLLM %s %s; version %s has it", vllm_version(), lacks, NEEDED)
            return
        from draftwood_memory.engines.metrics import show_metrics

        show_metrics()
        share_log()
        enable()
    except Exception:
        _log.exception("draftwood-vllm cannot tell what this version of vLLM offers")


class Proposer:
    """Drafts for a worker of vLLM: `--speculative-config '{"method": "custom_class", "model":
    "draftwood_vllm.Proposer", "num_speculative_tokens": 16}'`.

    Args:
        vllm_config: vLLM's configuration.
    """

    def __init__(self, vllm_config: Any) -> None:
        share_log()
        self._config = vllm_config
        self._runner: Any = None
        self._opened: OpenedDrafts | None = None
        self._off = False
        self._longest = int(vllm_config.speculative_config.num_speculative_tokens)
        self._most = int(vllm_config.model_config.max_model_len)
        repair()
        try:
            Binding.expect(_RUNNER, "drafter", self)
        except Exception as error:
            self._switch_off(f"it cannot be bound to the model runner: {error}", error)

    def bind(self, runner: Any) -> None:
        """Called once, with the model runner that drafts are for, while it is being made."""
        self._runner = runner

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Opens the memory. vLLM calls it when the model is loaded."""
        if self._off or self._opened is not None:
            return
        missing = [name for name in ("requests", "input_batch") if not hasattr(self._runner, name)]
        if missing:
            self._switch_off(f"{type(self._runner).__name__} has no {' and no '.join(missing)}; vLLM {NEEDED} has")
            return
        try:
            if not _is_drafting_rank(self._config):
                self._off = True
                return
            from draftwood_vllm.opening import open_drafts

            self._opened = open_drafts(os.environ, served_model(self._config), self._longest, self._is_live)
            if reason := lacking():
                say_first_runner(reason)
        except Exception as error:
            self._switch_off(f"{type(error).__name__}: {error}")

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        *_: Any,
        **__: Any,
    ) -> list[list[int]]:
        """A chain of draft tokens for each row, empty where there is none.

        Args:
            sampled_token_ids: what each row wrote in this step; empty while its prompt is not read to its end.
            num_tokens_no_spec: int32[rows or more], tokens of each row, these among them.
            token_ids_cpu: int32[rows or more, max_model_len], these tokens.
        """
        drafts = None
        if not self._off and self._opened is not None:
            rows = partial(self._rows, sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            drafts = self._opened.drafts.attempt(rows)
        if drafts is None:
            return [[] for _ in sampled_token_ids]
        tokens, offsets = drafts.tokens.tolist(), drafts.offsets.tolist()
        return [tokens[begin:end] for begin, end in pairwise(offsets)]

    def _rows(self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any) -> list[Row]:
        from draftwood_memory.engines.session import Row

        batch, requests = self._runner.input_batch, self._runner.requests
        ids, prompts, made = batch.req_ids, batch.num_prompt_tokens, []
        for i, written in enumerate(sampled):
            params = requests[ids[i]].sampling_params
            length, prompt = int(lengths[i]), int(prompts[i])
            left = self._most - length
            if params.max_tokens is not None:
                left = min(left, params.max_tokens - (length - prompt))
            if requests[ids[i]].prompt_token_ids is None:  # it is of embeddings
                prompt = 0
            decodes = len(written) > 0 and prompt > 0
            stops = params.all_stop_token_ids
            made.append(Row(ids[i], tokens[i, :length], prompt, left - 1, params.extra_args, decodes, stops))
        return made

    def _is_live(self, request_id: str) -> bool:
        """Preempted requests are live."""
        return request_id in self._runner.requests

    def _switch_off(self, reason: str, error: Exception | None = None) -> None:
        self._off = True
        _log.error("vLLM %s goes on without drafts of Draftwood: %s", vllm_version(), reason, exc_info=error)
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened.close()
        from draftwood_tenants.engines import show_failure

        show_failure(os.environ)


def _is_drafting_rank(config: Any) -> bool:
    """Whether this rank's drafts are used: those of the first rank of tensor parallelism in the last stage.

    Raises:
        RuntimeError: each rank decides for itself what to run, and their drafts may differ.
    """
    from vllm.distributed import parallel_state

    parallel = config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise RuntimeError("with external_launcher each rank has drafts of its own, which may differ")
    groups = [parallel_state.get_tp_group()]
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        groups.append(parallel_state.get_pcp_group())
    return all(group.rank_in_group == 0 for group in groups)
