"""Draftwood's engine without its service, measured as the peers are. `serve_peer` runs it."""

from __future__ import annotations

import gc
import itertools
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from draftwood_benchmarks.harness.answers import Task, finish, sequences
from draftwood_model_runner import engine
from draftwood_model_runner.engine import EngineConfig
from draftwood_model_runner.loading.model import load_model
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy, create
from draftwood_strategies.registry import warm_up


class Engine:
    """The loaded model.

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
        self._max_draft_nodes = config.max_draft_nodes
        self._strategy: str = "none" if request["drafts"] == "none" else request["strategy"]
        self._memories: dict[str, Strategy] = {}
        self._numbers = itertools.count()
        warm_up(self._strategy)
        if request["own_text"]:
            own_text = self._engine.own_text(request["own_text"], Path(request["own_text_folder"]))
            while not own_text.done:
                own_text.step()
            self._engine.set_model_table(own_text.rows)
        gc.collect()
        gc.freeze()  # as in the service

    def learn(self, prompts: list[list[int]], max_tokens: int, memory: str) -> dict[str, Any]:
        """Answers all prompts, which drafts then know."""
        started = time.perf_counter()
        finish(self._engine, [self._sequence(prompt, max_tokens, memory) for prompt in prompts])
        return {"seconds": time.perf_counter() - started}

    def load_test(
        self, prompts: list[list[int]], max_tokens: int, streams: int, seconds: float, memory: str = ""
    ) -> dict[str, Any]:
        """Keeps `streams` requests running for `seconds`; counts the tokens that they get.

        With a memory each prompt is asked once: the window ends with the prompts.
        """
        waiting = iter(prompts) if memory else itertools.cycle(prompts)
        live: list[Sequence] = []

        def begin(count: int) -> None:
            for prompt in itertools.islice(waiting, count):
                live.append(self._sequence(prompt, max_tokens, memory))
                self._engine.add(live[-1])

        begin(streams)
        count = steps = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            for output in self._engine.step():
                count += len(output.token_ids)
                steps += 1
            begin(streams - self._engine.running - self._engine.waiting)
            if self._engine.running + self._engine.waiting < streams:
                break  # no prompts are left
        for sequence in live:
            self._engine.cancel(sequence)
        while self._engine.has_work:
            self._engine.step()
        return {"tokens": count, "seconds": elapsed, "steps": steps}

    def _sequence(self, prompt: list[int], max_tokens: int, memory: str) -> Sequence:
        if memory not in self._memories:
            self._memories[memory] = create(self._strategy)
        [sequence] = sequences(
            [np.array(prompt, np.int32)],
            Task(max_tokens),
            self._memories[memory],
            seed=next(self._numbers),
            tenant=memory,
            strategy_name=self._strategy,
            max_draft_nodes=self._max_draft_nodes,
        )
        return sequence
