"""The model, what runs it, and how requests share it. Knows no engine: vLLM checks `engine_args` itself as it loads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftwood_memory.settings import cache_folder
from draftwood_model_runner.engine_config import MODEL_CACHE_BYTES, check_runner, check_weights, no_head_reason
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL, may_have_mtp
from draftwood_model_runner.loading.sources import AUTO_HEAD, NO_HEAD, bundled_head
from draftwood_service.settings.groups import JsonObject, SettingsGroup, Size, Weights

ENGINE_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    # vLLM shows no predictions beside the written tokens, so what a hybrid adds to the trie learns nothing there.
    {"vllm": MappingProxyType({"strategy": "trie", "own_text_tokens": 0, "draft_head": NO_HEAD})}
)
"""Defaults of settings that are others for an engine than for Draftwood's own."""

_VLLM_DRAFTS = "vLLM loads drafters itself, by its speculative_config; docs/vllm.md has how ours draft beside them"
_VLLM_REFUSES: Mapping[str, str] = MappingProxyType(
    {
        "exact": "vLLM has no exact mode",
        "runner": "runners are those of Draftwood's own engine",
        "weights": 'vLLM takes quantized checkpoints as they are, and --engine-args \'{"quantization": "fp8"}\'',
        "device": "vLLM chooses the device; CUDA_VISIBLE_DEVICES limits it",
        "threads": "OMP_NUM_THREADS and VLLM_CPU_OMP_THREADS_BIND set the threads of vLLM on CPUs",
        "device_drafts": "the plug-in chooses: on the GPU where vLLM's second model runner can, see docs/vllm.md",
        "draft_model": _VLLM_DRAFTS,
        "draft_head": _VLLM_DRAFTS,
        "own_text_tokens": "a successor table needs the model's predictions, which vLLM does not show",
        "shared_prefill_chunk": "vLLM has one limit of tokens for all steps, prefill_chunk",
    }
)
VLLM_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model",
        "dtype": "dtype",
        "max_model_len": "max_context",
        "max_num_seqs": "max_running",
        "tensor_parallel_size": "tensor_parallel",
        "pipeline_parallel_size": "pipeline_parallel",
        "nnodes": "nodes",
        "node_rank": "node_rank",
        "master_addr": "leader",
        "enable_prefix_caching": "prefix_cache",
        "num_gpu_blocks_override": "kv_cache_tokens",
        "max_num_batched_tokens": "prefill_chunk",
        "generation_config": "generation_defaults",
        "speculative_config": "max_draft_nodes",
    }
)
"""Arguments of vLLM that settings stand for, with these."""


class ModelSettings(SettingsGroup):
    """Model and engine.

    Bounds of the engine's own values are checked by `EngineConfig`.
    """

    model: str | None = None
    """Folder, GGUF file or hub id of the model, or a name that `draftwood models` lists; unset: the bundled model"""
    draft_model: str | None = None
    """Smaller model of the same vocabulary that drafts beside the model, named as that is; unset: none"""
    draft_head: str = AUTO_HEAD
    """Folder of a draft head in the form of EAGLE-3 that was trained for the model; mtp: the module for multi-token
    prediction of the model's checkpoint; auto: the head that Draftwood has for the model, or else this module, if there
    is one; none: no head. Heads need tensor_parallel 1"""
    engine: Literal["draftwood", "vllm"] = "draftwood"
    """What runs the model: draftwood, Draftwood's own engine, or vllm, for several machines' worth of GPUs and all that
    vLLM serves (pip install 'draftwood[vllm]')"""
    engine_args: JsonObject = Field(default={})
    """Further engine arguments of vLLM, as a JSON object such as {"quantization": "fp8"} (engine vllm)"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the model's computation"""
    max_context: int | None = Field(default=None, ge=2)
    """Maximum number of prompt and output tokens of a request; unset: the model's maximum"""
    exact: bool | None = None
    """Make logits independent of drafts and batch, bit by bit (runner torch on CPUs, and runner cuda); unset: only with
    runner torch on CPUs, below float32"""
    runner: Literal["auto", "cuda", "openvino", "torch"] = "auto"
    """What computes the steps; auto: cuda on GPUs, openvino on CPUs, for models that they support, else torch"""
    weights: Literal["as-is", "int8", "int4"] = "as-is"
    """Weights in memory; as-is: in the data type of the computation, int8, int4: quantized to 8 or 4 bits (runner
    openvino)"""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share each layer of the model: of this machine (runner cuda), or of vLLM's"""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Parts that the model's layers are divided into, each on tensor_parallel GPUs (engine vllm)"""
    nodes: int = Field(default=1, ge=1)
    """Machines that share the model, each with the same number of its GPUs (engine vllm)"""
    node_rank: int = Field(default=0, ge=0)
    """Number of this machine among the nodes; 0: the leader, which serves; the others compute for it until it ends"""
    leader: str | None = None
    """Host name or address of the leader, for nodes above 1"""
    generation_defaults: Literal["model", "greedy"] = "model"
    """Where defaults of requests come from: the model's generation_config.json, or greedy decoding"""
    threads: int | None = None
    """CPU threads of a step; unset: all cores, within the CPU quota of the container"""
    model_cache: bool = True
    """Keep models that OpenVINO converted on disk, so that the next start is shorter; GGUF files need it"""
    model_cache_folder: Path | None = None
    """Folder of converted models and of the dense weights of GGUF files; unset: ~/.cache/draftwood/models"""
    model_cache_bytes: Size = Field(default=MODEL_CACHE_BYTES, ge=0)
    """Size of all converted models on disk; those not used for longest make room for another one"""
    own_text_tokens: int = Field(default=20_000, ge=0, le=1 << 20)
    """Tokens that the model writes by itself while it is idle, for drafts of tenants without answers yet; kept in the
    folder of converted models, so that it writes them once. 0: none"""
    compiled_functions: Path | None = None
    """Folder of compiled functions, copied at the start to the folder that the environment variable NUMBA_CACHE_DIR
    names; an image has one"""

    @property
    def model_path(self) -> str:
        """Folder or hub id of the model."""
        return BUNDLED_MODEL if self.model is None else self.model

    @property
    def cache_folder(self) -> Path | None:
        """Folder of what the next start finds: converted models, and a note on each store; None for none."""
        if not self.model_cache or self.model_cache_folder is not None:
            return self.model_cache_folder if self.model_cache else None
        return cache_folder(os.environ)

    @property
    def model_strategies(self) -> list[str]:
        """Strategies that draft by models beside the model, as far as that is known before it is loaded."""
        # A GGUF file may be a model that has a head.
        path = self.model_path
        found = path.endswith(".gguf") or bundled_head(path) or may_have_mtp(path)
        has_head = self.draft_head != NO_HEAD and (self.draft_head != AUTO_HEAD or found)
        heads = ["head"] if has_head and not self._no_head_reason else []
        return heads if self.draft_model is None else [*heads, "draft_model"]

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise InvalidValueError("device", device, "it must be auto, cpu, cuda or cuda:N")
        return device

    @model_validator(mode="before")
    @classmethod
    def _of_engine(cls, given: Any) -> Any:
        """The engine's own defaults, where they are others than those of Draftwood's engine."""
        engine = given.get("engine") if isinstance(given, dict) else None
        return {**ENGINE_DEFAULTS.get(str(engine), {}), **given}

    def check_engine(self) -> None:
        """Raises InvalidValueError for a setting, of any group, that the engine does not have, or not with others."""
        if self.engine == "draftwood":
            check_runner(self.runner, self.exact)
            check_weights(self.weights, self.runner, self.exact)
            for name in ("pipeline_parallel", "nodes"):
                if getattr(self, name) > 1:
                    problem = "must be 1 with engine draftwood; set --engine vllm"
                    raise InvalidInputError(name, getattr(self, name), problem)
            self._check_drafters()
            if self.engine_args:
                problem = "are arguments of vLLM; the engine is draftwood: set --engine vllm"
                raise InvalidInputError("engine_args", None, problem)
            return
        defaults = ENGINE_DEFAULTS[self.engine]
        for name, reason in _VLLM_REFUSES.items():
            if getattr(self, name) != defaults.get(name, type(self).model_fields[name].default):
                raise InvalidInputError(name, getattr(self, name), f"is not a setting of engine vllm: {reason}")
        for name in self.engine_args:
            if (argument := VLLM_ARGUMENTS.get(name)) is not None:
                raise InvalidInputError(f"engine_args[{name}]", None, f"is set by --{argument.replace('_', '-')}")
        self._check_nodes()

    def _check_drafters(self) -> None:
        """Raises InvalidValueError for models that cannot draft by these settings."""
        if self.draft_head not in (AUTO_HEAD, NO_HEAD) and self._no_head_reason:
            allowed = f"it must be {AUTO_HEAD} or {NO_HEAD}: {self._no_head_reason}"
            raise InvalidValueError("draft_head", self.draft_head, allowed)
        if self.draft_model is not None and self.tensor_parallel > 1:
            problem = f"it must be unset, since tensor_parallel is {self.tensor_parallel}"
            raise InvalidValueError("draft_model", self.draft_model, problem)

    @property
    def _no_head_reason(self) -> str:
        return no_head_reason(self.tensor_parallel)

    def _check_nodes(self) -> None:
        ranks = self.tensor_parallel * self.pipeline_parallel
        if ranks % self.nodes:
            problem = f"must divide tensor_parallel * pipeline_parallel, which is {ranks}"
            raise InvalidInputError("nodes", self.nodes, problem)
        if self.node_rank >= self.nodes:
            raise InvalidInputError("node_rank", self.node_rank, f"must be below nodes, which is {self.nodes}")
        if self.nodes > 1 and not self.leader:
            raise InvalidInputError("leader", None, "must be set, since nodes is above 1")
        executor = self.engine_args.get("distributed_executor_backend", "mp")
        if self.nodes > 1 and executor != "mp":
            problem = f"must be mp with nodes above 1, and is {executor}; with ray leave nodes at 1"
            raise InvalidInputError("engine_args[distributed_executor_backend]", None, problem)


class SchedulingSettings(SettingsGroup):
    """Scheduling.

    Two defaults were measured, see docs/decisions/first-tokens.md: prefill_chunk and shared_prefill_chunk.
    """

    max_running: int = Field(default=8, le=4096)
    """Maximum number of requests that run in one batch"""
    max_waiting: int = Field(default=64, ge=0, le=1_000_000)
    """Maximum number of waiting requests"""
    kv_cache_tokens: int | None = None
    """Capacity of the KV cache in tokens; unset: on GPUs max_running full contexts, on CPUs max_running contexts of
    4096 tokens, or one full context if that is more; limited by free memory"""
    prefix_cache: bool = True
    """Reuse the KV cache of common prompt prefixes within a tenant"""
    prefill_chunk: int = 512
    """Prompt tokens of a step in which no request decodes"""
    shared_prefill_chunk: int = 128
    """Prompt tokens of a step in which requests decode"""
    tenant_weights: Weights = Field(default={})
    """Scheduling weights of tenants, such as acme=2,beta=0.5; 1 for all others"""


class ProcessSettings(SettingsGroup):
    """Failures and shutdown."""

    stall_timeout: float = Field(default=30.0, gt=0)
    """Seconds until a request ends when its client does not read"""
    engine_restarts: int = Field(default=2, ge=0)
    """How often an engine process that died is restarted before the service exits with status 1"""
    engine_stall_timeout: float = Field(default=300.0, gt=0)
    """Seconds without a sign of life of the engine until the health service `liveness` is NOT_SERVING"""
    drain_grace: float = Field(default=25.0, ge=0)
    """Seconds for the whole shutdown, three quarters of them for live requests to finish; less than Kubernetes' 30"""
