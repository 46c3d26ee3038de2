"""The stages of the tests: each test is in exactly one, and a target of the Makefile runs it.

A mark of its own decides first, then its folder or file, then its parameters. All others are run by `make test`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

FAST = ""
TARGETS = {
    FAST: "test",
    "system": "test-system",
    "gpu_sim": "test-gpu-sim",
    "vllm": "test-vllm",
    "sglang": "test-sglang",
    "slow": "test-slow",
}
"""The target that runs a stage, by the stage's mark."""

GPU_SIM = ("tests/model_runner/runners/cuda/", "tests/strategies/device/simulated/", "tests/benchmarks/test_gpu.py")
SYSTEM = (
    "tests/benchmarks/test_load.py",
    "tests/benchmarks/test_lossless.py",
    "tests/benchmarks/test_models.py",
    "tests/benchmarks/test_speed.py",
    "tests/client/languages/",
    "tests/client/test_both_clients.py",
    "tests/client/test_console_script.py",
    "tests/distributions/test_environments.py",
    "tests/distributions/test_wheels.py",
    "tests/engines/",
    "tests/helm/test_rollout.py",
    "tests/helm/test_started.py",
    "tests/memory/engines/test_metrics.py",
    "tests/memory/test_connections.py",
    "tests/memory/test_lost.py",
    "tests/memory/test_operations.py",
    "tests/memory/test_purges.py",
    "tests/memory/test_sharing.py",
    "tests/memory/test_versions.py",
    "tests/model_runner/loading/sources/test_gguf_files.py",
    "tests/model_runner/loading/sources/test_known_models.py",
    "tests/model_runner/loading/test_conversion_cache.py",
    "tests/model_runner/loading/test_end_tokens.py",
    "tests/model_runner/loading/test_s3.py",
    "tests/model_runner/runners/openvino/test_output_head.py",
    "tests/model_runner/runners/openvino/test_weights.py",
    "tests/model_runner/runners/test_exact.py",
    "tests/model_runner/sampling/test_grammar_tokenizers.py",
    "tests/model_runner/test_latents.py",
    "tests/model_runner/test_model_drafts.py",
    "tests/model_runner/test_mtp_heads.py",
    "tests/model_runner/test_overlapping_steps.py",
    "tests/model_runner/test_own_text.py",
    "tests/model_runner/test_redecoding.py",
    "tests/model_runner/test_windows.py",
    "tests/security/",
    "tests/service/audits/test_real_engine.py",
    "tests/service/engine/test_process.py",
    "tests/service/experiments/test_live.py",
    "tests/service/gateway/test_connections.py",
    "tests/service/gateway/test_services.py",
    "tests/service/gateway/test_tools.py",
    "tests/service/quotas/test_shared.py",
    "tests/service/rpc/test_grammar_trial.py",
    "tests/service/rpc/test_memory.py",
    "tests/service/rpc/test_server_status.py",
    "tests/service/rpc/test_shaping.py",
    "tests/service/telemetry/test_metrics.py",
    "tests/service/tenants/test_unknown.py",
    "tests/service/test_commands.py",
    "tests/service/test_store_faults.py",
    "tests/strategies/device/test_appending.py",
    "tests/strategies/device/test_strategy.py",
    "tests/system/",
    "tests/tenants/test_lost.py",
)
"""Folders, with a slash at the end, and files: of real processes and faults, of what few models have, and of what waits
for clocks or computes for seconds, so that the fast stage ends within three minutes."""

FAST_FAMILIES = (("llama", "torch"), ("llama", "openvino"), ("qwen3", "openvino"))
"""Values of the parameters `family` and `runner`, torch if there is none, whose tests are fast."""


ONLY_FAST = " and ".join(f"not {mark}" for mark in TARGETS if mark != FAST)
"""The expression of marks that pytest runs with unless told otherwise."""


def is_never_fast(path: str) -> bool:
    """Whether no test of a file can be fast, whatever its marks and parameters are."""
    return _is_in(path, GPU_SIM) or _is_in(path, SYSTEM)


def stage_of(path: str, marks: Collection[str], parameters: Mapping[str, object]) -> str:
    """The stage of a test.

    Args:
        path: of its file, from the root of the repository.
        marks: the names of its marks.
        parameters: its values by name.

    Raises:
        ValueError: its marks name several stages.
    """
    marked = sorted(TARGETS.keys() & set(marks))
    if len(marked) > 1:
        raise ValueError(f"marked {' and '.join(marked)}, which are stages: a test is in one")
    if marked:
        return marked[0]
    if _is_in(path, GPU_SIM) or parameters.get("runner") == "cuda":
        return "gpu_sim"
    served = parameters.get("family"), parameters.get("runner", "torch")
    if _is_in(path, SYSTEM) or ("family" in parameters and served not in FAST_FAMILIES):
        return "system"
    return FAST


def _is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(path.startswith(place) if place.endswith("/") else path == place for place in places)
