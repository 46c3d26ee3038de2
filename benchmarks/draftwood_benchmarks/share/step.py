"""What a store costs a decoding step: two engines in this process, whose memories have a store and none.

Two processes differ by more than what is measured here, so both engines run in one, in turn. The model takes a fixed
time, in which the memory's thread may work, as beside a real one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from rich.console import Console

from draftwood_benchmarks.harness.report import progress
from draftwood_benchmarks.overhead.costless import (
    MAX_CONTEXT,
    STEP_SECONDS,
    CostlessRunner,
    costless_model,
    make_texts,
)
from draftwood_memory import Memory, MemoryName
from draftwood_memory.store.redis_client import RedisClient
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.sequence import Sequence

_STREAMS, _PROMPT_TOKENS, _ANSWER_TOKENS, _NODES = 8, 64, 200, 16
_STRATEGY, _TENANT = "trie", "step"


@dataclass(slots=True)
class _Host:
    """An engine and its memory, which are joined as in a service."""

    memory: Memory
    runner: CostlessRunner
    engine: Engine
    texts: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]]
    tasks: SimpleQueue[Callable[[], None]] = field(default_factory=SimpleQueue)

    def answer_all(self) -> float:
        """Answers all prompts; returns the seconds of host time of a step, on average."""
        strategy = self.memory.strategy(_TENANT, _STRATEGY)
        stop, steps, spent = StopParams(_ANSWER_TOKENS), self.engine.counts.steps, self.runner.seconds
        with ExitStack() as learning:
            scopes = {}
            for number, text in enumerate(self.texts):
                request = Request(
                    request_id=str(number),
                    prompt=text[:_PROMPT_TOKENS].copy(),
                    stop=stop,
                    strategy_name=_STRATEGY,
                    max_draft_nodes=_NODES,
                )
                sequence = Sequence(request, strategy)
                scopes[sequence] = learning.enter_context(self.memory.learning(MemoryName(_TENANT), strategy))
                self.engine.add(sequence)
            began = time.perf_counter()
            while self.engine.has_work:
                for output in self.engine.step():
                    if output.finish is not None:
                        scopes[output.sequence].learn(np.array(output.sequence.output, np.int32))
                while True:
                    try:
                        self.tasks.get_nowait()()
                    except Empty:
                        break
            seconds = time.perf_counter() - began
        return (seconds - (self.runner.seconds - spent)) / (self.engine.counts.steps - steps)


@contextmanager
def _host(url: str | None) -> Iterator[_Host]:
    texts = make_texts(_STREAMS, MAX_CONTEXT, seed=3)
    texts[:, 0] = np.arange(_STREAMS) + 100
    runner = CostlessRunner(texts, takes_time=True)
    engine = Engine(costless_model(runner), EngineConfig(max_running=_STREAMS, max_draft_nodes=_NODES))
    memory = Memory(None if url is None else RedisClient(url), "1" * 16)
    host = _Host(memory, runner, engine, [*texts])
    memory.start(host.tasks.put)
    try:
        yield host
    finally:
        engine.close()
        memory.stop()


def step_overhead(url: str, pairs: int, out: Console) -> dict[str, float]:
    """How much longer a step is with the store, the median over pairs of rounds, and half of their middle range.

    A round is eight answers of 200 tokens at once, which the memory learns; the order within pairs alternates.
    """
    overheads = []
    with _host(url) as attached, _host(None) as alone:
        for host in (attached, alone):
            host.answer_all()
        gc.collect()
        gc.freeze()
        try:
            for number in progress(range(pairs), "steps with and without the store", out):
                order = (attached, alone) if number % 2 else (alone, attached)
                host_seconds = {id(host): host.answer_all() for host in order}
                difference = host_seconds[id(attached)] - host_seconds[id(alone)]
                overheads.append(difference / (STEP_SECONDS + host_seconds[id(alone)]))
        finally:
            gc.unfreeze()
    first, middle, third = statistics.quantiles(overheads, n=4)
    return {"hot_path_overhead": middle, "hot_path_overhead_spread": (third - first) / 2}
