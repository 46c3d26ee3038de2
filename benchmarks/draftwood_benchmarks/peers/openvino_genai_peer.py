"""OpenVINO GenAI as a peer of the benchmarks, run by `serve_peer`.

Runs in `.venv-peers/openvino-genai` and imports nothing of Draftwood. One ContinuousBatchingPipeline serves single
streams and many: LLMPipeline wraps the same pipeline on x86.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
KV_CACHE_GB = 2
MODES = {"int8": ("INT8_ASYM", {}), "int4": ("INT4_ASYM", {"group_size": 128, "ratio": 1.0})}
"""How NNCF quantizes, by the name of the weights: what OpenVINO's exporter asks for by default."""
LOOKUP = {"num_assistant_tokens": 2, "max_ngram_size": 3}
"""What prompt lookup drafts with: tokens, and the longest n-gram that is looked up."""


class Engine:
    """Implements `serve_peer.StepEngine`."""

    def __init__(self, request: dict[str, Any]) -> None:
        import openvino_genai
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig

        folder = Path(request["folder"])
        # Larger models would be compressed to int8 by default. The plugin converts float32 to the precision below.
        weights = OVConfig(dtype="fp32")
        main_export(request["model"], folder, task="text-generation-with-past", ov_config=weights)
        if request["weights"] in MODES:
            _quantize(folder, request["weights"])
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GB
        scheduler.max_num_seqs = request["streams"]
        scheduler.enable_prefix_caching = False
        precision = PRECISION[request["dtype"]]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,  # the default, u8, is not lossless
            "INFERENCE_NUM_THREADS": request["threads"],
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        lookup = LOOKUP if request["drafts"] == "prompt-lookup" else {}
        if lookup:
            properties["prompt_lookup"] = True
        self.version: str = openvino_genai.__version__
        self._config = functools.cache(lambda max_tokens: _config(folder, max_tokens, lookup))
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._ids = itertools.count()
        self._running: dict[str, Any] = {}

    def use(self, memory: str) -> None:
        """Its drafts remember nothing."""

    def add(self, prompt: list[int], max_tokens: int, memory: str) -> str:
        import numpy as np
        import openvino

        number = next(self._ids)
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._running[str(number)] = self._pipeline.add_request(number, ids, self._config(max_tokens))
        return str(number)

    def step(self) -> Iterable[tuple[str, list[int], bool]]:
        import openvino_genai

        self._pipeline.step()
        for request, handle in [*self._running.items()]:
            tokens: list[int] = []
            while handle.can_read():
                tokens += [token for output in handle.read().values() for token in output.generated_ids]
            ended = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            if ended:
                del self._running[request]
            if tokens or ended:
                yield request, tokens, ended

    def abort(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._running.pop(request).stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def _config(folder: Path, max_tokens: int, lookup: dict[str, int]) -> Any:
    """How greedy answers are written."""
    import openvino_genai

    config = openvino_genai.GenerationConfig(folder / "generation_config.json")
    config.max_new_tokens = max_tokens
    config.do_sample = False
    for name, value in lookup.items():
        setattr(config, name, value)
    return config


def _quantize(folder: Path, weights: str) -> None:
    """Quantizes the weights of an exported model as `optimum-cli export openvino --weight-format` does."""
    import nncf
    import openvino

    path = folder / "openvino_model.xml"
    name, options = MODES[weights]
    mode = nncf.CompressWeightsMode[name]
    # Inputs that are no multiple of the group, such as 576, get smaller groups. Without, NNCF refuses the model.
    fallback = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
    read = openvino.Core().read_model(path)
    model = nncf.compress_weights(read, mode=mode, advanced_parameters=fallback, **options)
    quantized = folder / "quantized.xml"
    openvino.save_model(model, quantized, compress_to_fp16=False)
    del model  # it reads from the file that is replaced
    quantized.replace(path)
    quantized.with_suffix(".bin").replace(path.with_suffix(".bin"))
