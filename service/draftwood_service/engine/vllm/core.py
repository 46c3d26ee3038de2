"""All that touches vLLM: its engine core in processes of its own, as of vLLM 0.32.

vLLM's own front ends turn tokens into text and end answers by rules of their own. Here answers end where they do in
Draftwood's engine, so this talks to the engine core, as those front ends do, and passes on what each step wrote.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from pathlib import Path
from typing import Any

import structlog

from draftwood_model_runner.errors import EngineStoppedError, InvalidInputError
from draftwood_model_runner.output import TokenLogprobs
from draftwood_service.engine.vllm.requests import CoreOutput, CoreStep
from draftwood_strategies.threads import usable_cpus

_log = structlog.get_logger(__name__)

TESTED = "0.32"
"""The extra `draftwood[vllm]` requires it."""
_LOOK_SECONDS = 0.2
"""Polling interval of vLLM's processes, while they write nothing."""
_CPU_CACHE_BYTES = 4 * 2**30
"""As earlier versions of vLLM took; at most half of the memory that is free."""
_NUMA_NODES = Path("/sys/devices/system/node")
_STOP_SECONDS = 5.0
"""For vLLM's processes to end by themselves."""


class VllmCore:
    """A running engine core. All methods are for one thread.

    Args:
        arguments: of vLLM's `EngineArgs`.
        wake: called from another thread when a step is there to be taken, and when vLLM has died.

    Attributes:
        version: of vLLM.
        pages: of its KV cache.
        facts: fields of `ModelInfo` that vLLM decides.

    Raises:
        InvalidInputError: an argument is not known, or vLLM does not take its value.
    """

    def __init__(self, arguments: Mapping[str, Any], wake: Callable[[], None]) -> None:
        from vllm.v1.engine.core_client import SyncMPClient
        from vllm.v1.executor import Executor

        self.version = tested_version()
        config = engine_config(arguments)
        self._client = SyncMPClient(config, Executor.get_class(config), log_stats=True)
        self.facts = _facts(config)
        self.pages = int(config.cache_config.num_gpu_blocks or 0)
        self._steps: deque[CoreStep] = deque()
        self._error: EngineStoppedError | None = None
        self._wake = wake
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="vllm-outputs", daemon=True)
        self._thread.start()

    @property
    def has_step(self) -> bool:
        """There is a step to take, or an error to raise."""
        return bool(self._steps) or self._error is not None

    def take(self) -> CoreStep:
        """The oldest step that was not taken. Raises EngineStoppedError if a process of vLLM has died."""
        if self._error is not None:
            raise self._error
        return self._steps.popleft()

    def add(self, request_id: str, prompt: list[int], params: Mapping[str, Any], salt: str) -> None:
        """Begins a request.

        Args:
            params: see `sampling_params`.
            salt: requests with the same one share cached prefixes.
        """
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=sampling_params(**params),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
            external_req_id=request_id,
        )
        self._checked(lambda: self._client.add_request(request))

    def abort(self, request_ids: list[str]) -> None:
        """Ends requests; a step in which they still are may show more of them."""
        self._checked(lambda: self._client.abort_requests(request_ids))

    def close(self) -> None:
        """Ends vLLM's processes; idempotent."""
        self._closed.set()
        self._client.shutdown(_STOP_SECONDS)

    def _checked(self, call: Callable[[], None]) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            call()
        except EngineDeadError:
            raise EngineStoppedError("a process of vLLM has ended") from None

    def _collect(self) -> None:
        """Takes steps as they come, and looks for killed processes: vLLM's client does not wake its reader then."""
        while not self._closed.is_set():
            try:
                outputs = self._client.outputs_queue.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if not self._client.resources.engine_dead:
                    continue
                outputs = None
            if outputs is None or isinstance(outputs, Exception):
                if not self._closed.is_set():
                    self._error = EngineStoppedError("a process of vLLM has ended")
                    self._wake()
                return
            try:
                self._steps.append(_step(outputs))
            except Exception as error:
                _log.exception("a step of vLLM cannot be read")
                self._error = EngineStoppedError(f"a step of vLLM cannot be read: {error}")
            self._wake()


def sampling_params(
    *, grammar: Mapping[str, str] | None, ends: set[int], forbidden: SequenceOf[list[int]], **params: Any
) -> Any:
    """vLLM's `SamplingParams`.

    Args:
        grammar: {"json", "regex" or "grammar": text} that the answer follows; None for any answer.
        ends: tokens that end the answer, and no others do.
        forbidden: sequences of tokens that are not written.
        params: other fields of `SamplingParams`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    made = SamplingParams(
        **params,
        stop_token_ids=sorted(ends),
        ignore_eos=True,  # the ends are ours
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
        watermarking=False,
    )
    if grammar is not None:
        made.structured_outputs = StructuredOutputsParams(**grammar)
        made.structured_outputs._backend = "guidance"
    if forbidden:
        made._bad_words_token_ids = [*forbidden]
    return made


def tested_version() -> str:
    """vLLM's. Raises InvalidInputError: the engine core of another version may take other messages."""
    import vllm

    version = str(vllm.__version__)
    if version.split(".")[:2] != TESTED.split("."):
        problem = f"vLLM {version} is installed, and this version of Draftwood was tested with {TESTED}"
        raise InvalidInputError("engine", "vllm", problem)
    return version


def engine_config(arguments: Mapping[str, Any]) -> Any:
    """vLLM's configuration. Raises InvalidInputError."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    known = {field.name for field in fields(EngineArgs)}
    for name in arguments:
        if name not in known:
            raise InvalidInputError(f"engine_args[{name}]", None, "vLLM has no such engine argument")
    _run_in_one_process(arguments)
    try:
        return EngineArgs(**_with_memory(arguments)).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise InvalidInputError(
            "engine", "vllm", f"vLLM does not serve this model with these settings: {text}"
        ) from None


def workers_of_node(config: Any) -> Any:
    """vLLM's workers on a node that does not serve. Returns once they have joined those of the leader."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(config, monitor_workers=False)


def _run_in_one_process(arguments: Mapping[str, Any]) -> None:
    """On CPUs, lets vLLM's engine core compute itself where there is one rank and one NUMA node.

    With a worker beside it, which is vLLM's default, a core is reserved for the engine core, which spins on it. vLLM
    needs that to bind each rank's threads to a node of its own.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and _ranks(arguments) == 1 and len([*_NUMA_NODES.glob("node[0-9]*")]) <= 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))


def _with_memory(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """On CPUs vLLM wants 92% of the memory, or a size: by default it gets up to `_CPU_CACHE_BYTES`."""
    from vllm.platforms import current_platform

    sized = {"kv_cache_memory_bytes", "gpu_memory_utilization"} & arguments.keys()
    if not current_platform.is_cpu() or sized or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return arguments
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    of_rank = min(_CPU_CACHE_BYTES, free // 2) * int(arguments.get("nnodes", 1)) // _ranks(arguments)
    return {**arguments, "kv_cache_memory_bytes": of_rank}


def _ranks(arguments: Mapping[str, Any]) -> int:
    return int(arguments["tensor_parallel_size"]) * int(arguments["pipeline_parallel_size"])


def _facts(config: Any) -> dict[str, Any]:
    from vllm.platforms import current_platform

    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    return {
        "dtype": dtype,
        "weights": str(model.quantization or dtype),
        "device": str(current_platform.device_type),
        "vocab_size": int(model.get_vocab_size()),
        "max_context": int(model.max_model_len),
    }


def _step(outputs: Any) -> CoreStep:
    stats = outputs.scheduler_stats
    return CoreStep(
        [_output(output) for output in outputs.outputs], None if stats is None else float(stats.kv_cache_usage)
    )


def _output(made: Any) -> CoreOutput:
    from vllm.v1.engine import EngineCoreEventType

    began, preemptions = 0.0, 0
    for event in made.events or ():
        if event.type is EngineCoreEventType.SCHEDULED:
            began = began or event.timestamp  # of `time.monotonic`, which is the same clock in CPython on Linux
        preemptions += event.type is EngineCoreEventType.PREEMPTED
    drafts = made.spec_decode_metrics
    return CoreOutput(
        made.request_id,
        made.new_token_ids,
        [] if made.new_logprobs is None else _logprobs(made.new_logprobs),
        "" if made.finish_reason is None else str(made.finish_reason),
        began,
        preemptions,
        None if made.prefill_stats is None else int(made.prefill_stats.num_cached_tokens),
        None if drafts is None else int(drafts.num_draft_tokens),
    )


def _logprobs(lists: Any) -> list[TokenLogprobs]:
    """For each position the sampled token first, then the most probable ones."""
    return [
        TokenLogprobs(values[0], ids[1:], values[1:])
        for ids, values in zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True)
    ]


def process_variables(log_level: str) -> None:
    """Sets what vLLM's processes find in their environment, unless a user has set it."""
    # A forked process would keep the socket of the service open.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level.upper())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
