"""vLLM as a peer of the benchmarks, run by `serve_peer`, without drafts or with one of `SPECULATION`.

Runs in `.venv-peers/vllm` and imports nothing of Draftwood, except that vLLM itself loads `draftwood-vllm` for those
drafts. The engine core runs in this process, so that no message passes between processes in a step; vLLM schedules
asynchronously there too where its drafts allow it.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterable
from typing import Any

KV_CACHE_GB = 2
SPECULATION: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram-gpu": {
        "method": "ngram_gpu",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    },
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    # As deep as its suffix tree, and the other settings of its default.
    "suffix": {"method": "suffix"},
    "draftwood": {"method": "custom_class", "model": "draftwood_vllm.Proposer", "num_speculative_tokens": 16},
}


class Engine:
    """Implements `serve_peer.StepEngine`."""

    def __init__(self, request: dict[str, Any]) -> None:
        if request["weights"] != "as-is":
            raise ValueError(f"weights {request['weights']}: vLLM's CPU build does not quantize weights while it loads")
        self._drafts: str = request["drafts"]
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if importlib.util.find_spec("flashinfer") is None:  # vLLM would import it for sampling
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        if request.get("device", "cpu") == "cpu":
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GB)
            os.environ["OMP_NUM_THREADS"] = str(request["threads"])
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.version: str = vllm.__version__
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=request["model"],
                dtype=request["dtype"],
                max_num_seqs=request["streams"],
                max_model_len=request.get("max_model_len"),
                enable_prefix_caching=False,
                speculative_config=SPECULATION[self._drafts],
            )
        )
        self._ids = itertools.count()
        self._suffixes: dict[str, Any] = {}

    def use(self, memory: str) -> None:
        if self._drafts != "suffix":
            return
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        core: Any = self._engine.engine_core
        drafter = core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
        if memory not in self._suffixes:
            config = self._engine.vllm_config.speculative_config
            self._suffixes[memory] = SuffixDecodingCache(
                max_tree_depth=config.suffix_decoding_max_tree_depth,
                max_cached_requests=config.suffix_decoding_max_cached_requests,
            )
        drafter.suffix_cache = self._suffixes[memory]

    def add(self, prompt: list[int], max_tokens: int, memory: str) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        number = str(next(self._ids))
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"draftwood_tenant": memory or "none"} if self._drafts == "draftwood" else None,
        )
        self._engine.add_request(number, {"prompt_token_ids": prompt}, params)
        return number

    def step(self) -> Iterable[tuple[str, list[int], bool]]:
        return [(output.request_id, [*output.outputs[0].token_ids], output.finished) for output in self._engine.step()]

    def abort(self, requests: Iterable[str]) -> None:
        self._engine.abort_request([*requests])
        while self._engine.has_unfinished_requests():
            self._engine.step()
