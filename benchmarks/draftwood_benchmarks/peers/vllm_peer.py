"""vLLM's CPU build as a peer of the benchmarks, run by `serve_peer`, without drafts.

Runs in `.venv-peers/vllm` and imports nothing of Draftwood. The engine core runs in this process, so that no message
passes between processes in a step.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

KV_CACHE_GB = 2


class Engine:
    """The loaded model."""

    def __init__(self, request: dict[str, Any]) -> None:
        if request["weights"] != "as-is":
            raise ValueError(f"weights {request['weights']}: vLLM's CPU build does not quantize weights while it loads")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
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
                enable_prefix_caching=request["prefix_cache"],
            )
        )
        self._ids = itertools.count()

    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """The greedy answer to one prompt."""
        started = time.perf_counter()
        self._add(prompt, max_tokens)
        tokens: list[int] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens += output.outputs[0].token_ids
        return {"tokens": tokens, "seconds": time.perf_counter() - started}

    def load_test(self, prompts: list[list[int]], max_tokens: int, streams: int, seconds: float) -> dict[str, Any]:
        """Keeps `streams` requests running for `seconds`; counts the tokens that they get."""
        endless = itertools.cycle(prompts)
        running = {self._add(next(endless), max_tokens) for _ in range(streams)}
        count = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            for output in self._engine.step():
                count += len(output.outputs[0].token_ids)
                if output.finished:
                    running.remove(output.request_id)
                    running.add(self._add(next(endless), max_tokens))
        self._engine.abort_request([*running])
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"tokens": count, "seconds": elapsed}

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        number = str(next(self._ids))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
        self._engine.add_request(number, {"prompt_token_ids": prompt}, params)
        return number
