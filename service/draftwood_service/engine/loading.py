"""Loads Draftwood's own engine with the settings of the service."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from draftwood_memory.memory import opened_memory
from draftwood_model_runner.errors import InvalidValueError
from draftwood_service.engine.loaded import LoadedEngine
from draftwood_service.serving import ModelInfo
from draftwood_service.settings import Settings

if TYPE_CHECKING:
    from draftwood_model_runner.engine import Engine
    from draftwood_model_runner.loading.facts import DraftModelFacts
    from draftwood_model_runner.loading.loaded import LoadedModel

_log = structlog.get_logger("draftwood")

_LARGE = 100_000_000
"""Parameters of a model whose steps take as long as its weights are read; others gain less from shorter ones."""
_TENANTS, _ROW_TOKENS = 16, 1 << 15
"""On a GPU: tenants whose memories are there at once, and tokens that are kept of a sequence's own text at most, 141
bytes each. Not tuned."""
_SILENT_SECONDS = 3.0
"""Strategies that were compiled before are ready in a fraction of it."""


@contextmanager
def loaded(
    settings: Settings, wake: Callable[[], None], name: str, tell: Callable[[str], None]
) -> Iterator[LoadedEngine]:
    """The engine.

    Args:
        wake, name: not needed: the engine works in the steps of its host, and leaves nothing behind.
        tell: called with the class of the model's tokenizer, `Tokenizer.class_path`.

    Raises:
        DraftwoodError: the model or a setting is not one that can be served.
    """
    began = time.perf_counter()

    def finished(step: str) -> None:
        nonlocal began
        now = time.perf_counter()
        _log.info("loading", finished=step, seconds=round(now - began, 2))
        began = now

    from draftwood_model_runner.engine import Engine, model_strategies, warm_up
    from draftwood_model_runner.execution import check_capacity
    from draftwood_model_runner.runners.machine import trim_heap
    from draftwood_strategies.draft_engine.watchdog import Watchdog

    finished("imports")
    if (settings.max_context, settings.kv_cache_tokens) != (None, None):
        check_capacity(settings.model_path, settings.max_context, settings.engine_config)
    _warm_up_strategies()
    finished("strategies")
    model = _loaded_model(settings)
    finished("model")
    info = ModelInfo.of(model)
    with (
        ExitStack() as offering,  # ends last: the memory makes strategies until it is closed
        opened_memory(settings.of_memory, info.fingerprint) as memory,
        device_drafts(settings, model) as arena,
    ):
        finished("memory")
        weights = dict(settings.tenant_weights)
        config = replace(settings.engine_config, tenant_weights=weights, steps_ahead=arena is not None)
        engine = Engine(model, config, Watchdog())
        finished("engine")
        info = replace(info, draft_models=_agreeing(engine, settings))
        offering.enter_context(model_strategies(engine))
        tell(model.tokenizer.class_path)  # not before: its work would slow down the steps that are measured
        warm_up(engine)
        finished("warm-up")
        own_text = None
        if settings.own_text_tokens:
            own_text = engine.own_text(settings.own_text_tokens, settings.cache_folder)
        trim_heap()
        gc.freeze()  # a collection that scans the loaded model's objects would stop all requests for 0.3 s
        gc.enable()
        yield LoadedEngine(
            engine,
            memory,
            model.grammars,
            info,
            settings.memory_preload,
            settings.strategy,
            settings.audit_share,
            weights,
            own_text=own_text,
        )


def device_drafts(settings: Settings, model: LoadedModel) -> AbstractContextManager[object]:
    """In it new instances of `trie`, `recycling` and `hybrid` draft on the GPU, if the settings say so and it can.
    Before the engine takes the memory that is free for its KV cache."""
    if settings.device_drafts == "off":
        return nullcontext()
    if model.runner_name != "cuda":
        _log.warning("device drafts need runner cuda; drafts are made by the host", runner=model.runner_name)
        return nullcontext()
    from draftwood_strategies.built_in import RecyclingOptions, TrieOptions
    from draftwood_strategies.device.arena import MOST_NODES, DeviceSizes
    from draftwood_strategies.device.strategy import drafts_on_device
    from draftwood_strategies.trie.phrase_index import LEAST_TOKENS

    tokens = min(TrieOptions.capacity_tokens, settings.memory_tokens, settings.memory_bytes // 4)  # as `resident.make`
    sizes = DeviceSizes(
        rows=settings.max_running,
        row_tokens=min(max(model.max_context, LEAST_TOKENS), _ROW_TOKENS),
        tenants=_TENANTS,
        tenant_tokens=tokens,
        nodes=max(1, min(settings.max_draft_nodes, MOST_NODES)),
        contexts=RecyclingOptions.capacity_contexts,
    )
    return drafts_on_device(sizes, model.device)


def _loaded_model(settings: Settings) -> LoadedModel:
    """The model of the settings; logs what computes it."""
    from draftwood_model_runner.loading.model import load_model

    model = load_model(
        settings.model_path,
        device=settings.device,
        dtype=settings.dtype,
        max_context=settings.max_context,
        exact=settings.exact,
        runner=settings.runner,
        weights=settings.weights,
        generation_defaults=settings.generation_defaults,
        threads=settings.threads,
        tensor_parallel=settings.tensor_parallel,
        cache=settings.cache_folder,
        cache_bytes=settings.model_cache_bytes,
        draft_model=settings.draft_model,
        draft_head=settings.draft_head,
    )
    _log.info("runner", runner=model.runner_name, weights=model.weights, reason=model.runner_reason)
    _tell_gains(model, settings)
    return model


def _agreeing(engine: Engine, settings: Settings) -> tuple[DraftModelFacts, ...]:
    """The models that draft beside the engine's. Of those that were not chosen by name, one that agrees with it too
    seldom is left out.

    Raises:
        InvalidValueError: one that was chosen agrees too seldom.
    """
    from draftwood_model_runner.engine import LEAST_AGREED, try_drafters
    from draftwood_model_runner.loading.sources import AUTO_HEAD

    shares, kept = try_drafters(engine), []
    for drafter in engine.model.draft_models:
        agreed = shares[drafter.strategy]
        of_head = drafter.strategy == "head"
        setting, value = ("draft_head", settings.draft_head) if of_head else ("draft_model", settings.draft_model)
        problem = f"it must hold {LEAST_AGREED:.0%} of the model's own tokens most probable, not {agreed:.1%}"
        if agreed < LEAST_AGREED and value != AUTO_HEAD:
            raise InvalidValueError(setting, value, f"{problem}: it is not one for this model")
        if agreed < LEAST_AGREED:
            _log.warning("the model is served without its draft head", reason=problem)
            del engine.model_drafts[drafter.strategy]
            continue
        facts = {"strategy": drafter.strategy, "name": drafter.name, "parameters": drafter.parameters}
        _log.info("a model drafts", **facts, agreed=round(agreed, 3))
        kept.append(drafter)
    return tuple(kept)


def _tell_gains(model: LoadedModel, settings: Settings) -> None:
    """Logs what shorter numbers would gain if nobody has chosen float32, and the model is large enough for it."""
    from draftwood_model_runner.runners.machine import gains_over_float32

    chosen = (settings.dtype, settings.weights) != ("auto", "as-is")
    if chosen or (model.device, model.dtype) != ("cpu", "float32") or model.parameters < _LARGE:
        return
    if gains := gains_over_float32():
        told = ", ".join(f"{option} about {gain:g} times" for option, gain in gains.items())
        _log.info("float32 is the default on CPUs; tokens a second on this one, roughly", faster=told)


def _warm_up_strategies() -> None:
    """Runs each strategy's just-in-time compilation. One that fails is disabled request by request, with the reason."""
    from draftwood_strategies.registry import strategy_names, warm_up

    hint = "the strategies are being compiled, as at the first start after an installation: about a minute"
    telling = threading.Timer(_SILENT_SECONDS, _log.info, [hint])
    telling.daemon = True
    telling.start()
    for name in strategy_names():
        try:
            warm_up(name)
        except Exception:
            _log.exception("strategy cannot be compiled", strategy=name)
    telling.cancel()
