"""Draftwood's engine without its service, measured as the peers are. `serve_peer` runs it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from draftwood_benchmarks.harness.answers import Task, sequences, write_own_text
from draftwood_model_runner import engine
from draftwood_model_runner.engine import EngineConfig
from draftwood_model_runner.loading.model import load_model
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy, create
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.registry import warm_up


class Engine:
    """Implements `serve_peer.StepEngine`.

    Further fields of the request: `device` and `runner` are as in `load_model`; `strategy` drafts unless `drafts` is
    "none"; `own_text` tokens are what the model writes by itself first, or takes from the file in `own_text_folder`.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.version = version("draftwood-model-runner")
        model = load_model(
            request["model"],
            device=request["device"],
            dtype=request["dtype"],
            runner=request["runner"],
            weights=request["weights"],
        )
        config = EngineConfig(max_running=request["streams"], prefix_cache=False, threads=request["threads"])
        self._engine = engine.Engine(model, config)
        self._strategy: str = "none" if request["drafts"] == "none" else request["strategy"]
        self._memories: dict[str, Strategy] = {}
        self._numbers = itertools.count()
        self._running: dict[str, Sequence] = {}
        warm_up(self._strategy)
        if request["own_text"]:
            folder = Path(request["own_text_folder"])
            self._engine.set_model_table(write_own_text(self._engine, request["own_text"], folder))
        gc.collect()
        gc.freeze()  # as in the service

    def use(self, memory: str) -> None:
        """A memory is a strategy, which `add` looks up."""

    def add(self, prompt: list[int], max_tokens: int, memory: str) -> str:
        if memory not in self._memories:
            self._memories[memory] = create(self._strategy)
        [sequence] = sequences(
            [np.array(prompt, np.int32)],
            Task(max_tokens),
            self._memories[memory],
            seed=next(self._numbers),
            tenant=memory,
            drafting=Drafting(self._strategy, max_nodes=self._engine.config.max_draft_nodes),
        )
        self._engine.add(sequence)
        self._running[sequence.request.request_id] = sequence
        return sequence.request.request_id

    def step(self) -> Iterable[tuple[str, list[int], bool]]:
        for output in self._engine.step():
            request = output.sequence.request.request_id
            if output.finish is not None:
                del self._running[request]
            yield request, [*output.token_ids], output.finish is not None

    def abort(self, requests: Iterable[str]) -> None:
        for request in requests:
            self._engine.cancel(self._running.pop(request))
        while self._engine.has_work:
            self._engine.step()
