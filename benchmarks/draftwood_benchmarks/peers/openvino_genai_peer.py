"""OpenVINO GenAI as a peer of the benchmarks, run by `serve_peer`.

Runs in `.venv-peers/openvino-genai` and imports nothing of Draftwood. One ContinuousBatchingPipeline serves single
streams and many: LLMPipeline wraps the same pipeline on x86.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

PRECISION = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
KV_CACHE_GB = 2
MODES = {"int8": ("INT8_ASYM", {}), "int4": ("INT4_ASYM", {"group_size": 128, "ratio": 1.0})}
"""How NNCF quantizes, by the name of the weights: what OpenVINO's exporter asks for by default."""
LOOKUP = {"num_assistant_tokens": 2, "max_ngram_size": 3}
"""What prompt lookup drafts with: tokens, and the longest n-gram that is looked up."""


class Engine:
    """The loaded model."""

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
        self._lookup: dict[str, int] = LOOKUP if request["drafts"] == "prompt-lookup" else {}
        if self._lookup:
            properties["prompt_lookup"] = True
        self.version: str = openvino_genai.__version__
        self._folder = folder
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._ids = itertools.count()

    def generate(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """The greedy answer to one prompt."""
        config = self._config(max_tokens)
        started = time.perf_counter()
        handle = self._add(prompt, config)
        tokens: list[int] = []
        steps = 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            written = _new_tokens(handle)
            tokens += written
            steps += bool(written)
        return {"tokens": tokens, "seconds": time.perf_counter() - started, "steps": steps}

    def load_test(self, prompts: list[list[int]], max_tokens: int, streams: int, seconds: float) -> dict[str, Any]:
        """Keeps `streams` requests running for `seconds`; counts the tokens that they get."""
        config = self._config(max_tokens)
        endless = itertools.cycle(prompts)
        handles = [self._add(next(endless), config) for _ in range(streams)]
        count = steps = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            self._pipeline.step()
            for i, handle in enumerate(handles):
                written = len(_new_tokens(handle))
                count += written
                steps += written > 0
                if _finished(handle):
                    handles[i] = self._add(next(endless), config)
        for handle in handles:
            handle.stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return {"tokens": count, "seconds": elapsed, "steps": steps}

    def _config(self, max_tokens: int) -> Any:
        import openvino_genai

        config = openvino_genai.GenerationConfig(self._folder / "generation_config.json")
        config.max_new_tokens = max_tokens
        config.do_sample = False
        for name, value in self._lookup.items():
            setattr(config, name, value)
        return config

    def _add(self, prompt: list[int], config: Any) -> Any:
        import numpy as np
        import openvino

        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(next(self._ids), ids, config)


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


def _new_tokens(handle: Any) -> list[int]:
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
    return tokens


def _finished(handle: Any) -> bool:
    import openvino_genai

    return bool(handle.get_status() != openvino_genai.GenerationStatus.RUNNING)
