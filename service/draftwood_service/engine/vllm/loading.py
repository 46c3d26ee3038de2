"""Starts vLLM with the settings of the service."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import structlog

from draftwood_memory.memory import opened_memory
from draftwood_memory.settings import ENV_PREFIX, MemorySettings
from draftwood_memory.store.embedded import EmbeddedServer, default_folder, socket_url
from draftwood_model_runner.engine_config import Abilities
from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.loading.checkpoint import CheckpointFacts, name_of, read_checkpoint
from draftwood_model_runner.loading.tokenizer import load_tokenizer
from draftwood_model_runner.output import OutputText
from draftwood_model_runner.request import MAX_LOGPROBS, Request, SamplingParams, StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_service.engine.link import service_has_ended
from draftwood_service.engine.loaded import LoadedEngine
from draftwood_service.engine.process import temporary_store
from draftwood_service.engine.vllm.core import VllmCore, process_variables
from draftwood_service.engine.vllm.engine import VllmEngine
from draftwood_service.engine.vllm.records import draft_records
from draftwood_service.engine.vllm.requests import params_of
from draftwood_service.serving import ModelInfo
from draftwood_service.settings import Settings
from draftwood_strategies.drafting import UNDRAFTED, Drafting
from draftwood_tenants.engines import TENANT_VARIABLE, checkpoint_of, fingerprint

_log = structlog.get_logger("draftwood")

LONGEST_CHAIN = 16
"""Draft tokens of a step and request at most: vLLM reserves room for them. `docs/vllm.md` has figures with it."""
_TOKENS = 12
_LOOK_SECONDS = 0.002


@contextmanager
def loaded(
    settings: Settings, wake: Callable[[], None], name: str, tell: Callable[[str], None]
) -> Iterator[LoadedEngine]:
    """The engine. Its processes end with the context.

    Args:
        wake: called from another thread when the engine has something to do.
        name: of the service, the same for a restarted engine.
        tell: called with the class of the model's tokenizer, `Tokenizer.class_path`.

    Raises:
        DraftwoodError: the model or a setting is not one that vLLM serves.
    """
    path = settings.model_path
    facts = read_checkpoint(path, settings.generation_defaults)
    drafts = drafts_of(settings)
    if settings.max_draft_nodes and not drafts:
        _log.warning("no drafts: vLLM has none with pipeline parallelism", pipeline_parallel=settings.pipeline_parallel)
    require_served(name_of(path), facts, drafts=drafts)
    tokenizer = load_tokenizer(path)
    tell(tokenizer.class_path)
    tokenizer.check_ends(facts.eos_token_ids)
    with ExitStack() as stack:
        settings = stack.enter_context(with_store(settings, name))
        records = stack.enter_context(draft_records())
        set_variables(settings)
        core = VllmCore(arguments_of(settings), wake)
        stack.callback(core.close)
        # As the worker's plug-in: both follow the same memories.
        identity = fingerprint("vLLM", checkpoint_of(path, None), f"{path} None", tokenizer.token_ids())
        memory = stack.enter_context(opened_memory(settings.of_memory, identity))
        eos, constraints = facts.eos_token_ids, facts.defaults.constraints
        weights = dict(settings.tenant_weights)

        def text(request: Request) -> OutputText:
            decoder = tokenizer.stream(request.include_special_tokens)
            return OutputText(decoder, request.stop, eos)

        engine = VllmEngine(
            core,
            slots=settings.max_running,
            pages=core.pages,
            weights=weights,
            params=lambda request: params_of(request, eos, constraints),
            text=text,
            records=records,
        )
        warm_up(engine, core.facts["vocab_size"], drafts=drafts)
        gc.collect()
        gc.freeze()
        gc.enable()
        yield LoadedEngine(
            engine,
            memory,
            None,
            _info(name_of(path), facts, core, identity, settings),
            0,
            settings.strategy,
            settings.audit_share,
            weights,
            can_audit,
            memory_report=lambda: (memory.counters() if records.memory is None else records.memory, records.healthy),
        )


def can_audit(request: Request) -> bool:
    """Greedy answers without penalties: their log-probabilities show how near the tokens were to each other."""
    sampling = request.sampling
    penalized = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)
    return sampling.temperature == 0.0 and not penalized


def drafts_of(settings: Settings) -> bool:
    """Whether there are drafts: vLLM 0.32 fails to run any with pipeline parallelism (its issue 30436)."""
    return settings.max_draft_nodes > 0 and settings.pipeline_parallel == 1


def arguments_of(settings: Settings) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`."""
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.max_running,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "enable_prefix_caching": settings.prefix_cache,
        "generation_config": "vllm",  # requests have all of their values when they come to vLLM
        "structured_outputs_config": {"backend": "guidance"},
    }
    if settings.nodes > 1:
        arguments |= {
            "nnodes": settings.nodes,
            "node_rank": settings.node_rank,
            "master_addr": settings.leader,
            "distributed_executor_backend": "mp",
        }
    if settings.kv_cache_tokens is not None:
        block_size = settings.engine_args.get("block_size") or 32
        arguments |= {
            "block_size": block_size, "num_gpu_blocks_override": -(-settings.kv_cache_tokens // block_size) + 1,
        }  # fmt: skip
    if "prefill_chunk" in settings.model_fields_set:
        arguments["max_num_batched_tokens"] = settings.prefill_chunk
    if drafts_of(settings):
        arguments["speculative_config"] = {
            "method": "custom_class",
            "model": "draftwood_vllm.Proposer",
            "num_speculative_tokens": min(LONGEST_CHAIN, settings.max_draft_nodes),
        }
        arguments["per_request_spec_decode_metrics"] = "summary"
    return {**arguments, **settings.engine_args}


def require_served(name: str, facts: CheckpointFacts, *, drafts: bool) -> None:
    """Raises UnsupportedModelError if the model's generation config asks for what vLLM does not have."""
    constraints, sampling = facts.defaults.constraints, facts.defaults.sampling
    unsupported = {
        "no_repeat_ngram_size": constraints.no_repeat_ngram_size,
        "begin_suppress_tokens": constraints.suppressed_first,
        "forced_eos_token_id": constraints.forced_last,
        "min_p": drafts and sampling.min_p,
    }
    for field, value in unsupported.items():
        if value:
            raise UnsupportedModelError(
                f"{name}: its generation config sets {field}, which engine vllm does not have; remove it, or ignore the"
                " config by --generation-defaults greedy"
            )


def set_variables(settings: Settings) -> None:
    """The environment of vLLM's processes: the plug-in reads the settings of its memory there."""
    process_variables(settings.log_level)
    for field in fields(MemorySettings):
        name, value = ENV_PREFIX + field.name.upper(), getattr(settings, field.name)
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
    os.environ.pop(TENANT_VARIABLE, None)


def _info(name: str, facts: CheckpointFacts, core: VllmCore, identity: str, settings: Settings) -> ModelInfo:
    drafts = drafts_of(settings)
    return ModelInfo(
        name=name,
        exact=False,
        runner_name="vllm",
        runner_reason=f"vLLM {core.version}, by --engine vllm",
        architecture=facts.architecture,
        parameters=facts.parameters,
        **core.facts,
        fingerprint=identity,
        eos_token_ids=facts.eos_token_ids,
        defaults=facts.defaults,
        abilities=Abilities(
            engine="vllm",
            version=core.version,
            reproducible_seeds=False,
            draft_trees=False,
            branching_drafts=False,
            min_p=not drafts,
            logit_bias=not drafts,
            max_temperature=2.0,
            max_penalty=2.0,
            pauses=False,
            preempts=False,
            audits_samples=False,
        ),
    )


@contextmanager
def with_store(settings: Settings, name: str) -> Iterator[Settings]:
    """The settings with the address of a store that both processes reach.

    An embedded store is run by this process. With none (`store` is "memory") there is one as well, on a temporary
    folder: drafts and operations on memories work as if they were in one process; what was learned outlives an engine
    that dies, and is gone with the service.

    Args:
        name: of the service.
    """
    if settings.store not in ("memory", "embedded"):
        yield settings
        return
    temporary = settings.store == "memory"
    folder = temporary_store(name) if temporary else settings.store_folder or default_folder()
    try:
        with EmbeddedServer(folder, settings.store_bytes) as server:
            server.wait()
            yield settings.model_copy(update={"store": socket_url(folder)})
    except BaseException as error:
        if temporary and (isinstance(error, EOFError) or service_has_ended(error)):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def warm_up(engine: VllmEngine, vocab_size: int, *, drafts: bool) -> None:
    """Runs a greedy request, a sampled one and one with log-probabilities, as audits have; nothing is learned.

    Raises:
        EngineStoppedError: vLLM has died.
    """
    prompt = (np.arange(24) % min(3, vocab_size)).astype(np.int32)
    sampled = SamplingParams(temperature=1.0, top_p=0.9, top_k=10)
    for sampling in (SamplingParams(), sampled, SamplingParams(logprobs=MAX_LOGPROBS)):
        request = Request(
            request_id="warm-up",
            prompt=prompt,
            stop=StopParams(max_tokens=_TOKENS, ignore_eos=True),
            sampling=sampling,
            drafting=Drafting("trie", max_nodes=8) if drafts else UNDRAFTED,
            learns=False,
        )
        engine.add(Sequence(request))
    while not engine.idle:
        if engine.has_work:
            engine.step()
        else:
            time.sleep(_LOOK_SECONDS)
    engine.forget_counts()
