"""The program of a peer: `python serve_peer.py MODULE`, where the module beside it has the class `Engine`.

The protocol is described in `process.py` beside this file. An `Engine` has a method for each operation, or it is a
`StepEngine`, which the functions here drive. Runs in the environment of a peer and imports nothing of Draftwood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class StepEngine(Protocol):
    """A loaded model that computes its requests together, step by step."""

    version: str

    def use(self, memory: str) -> None:
        """Lets drafts come from what was answered under this name. Only between requests."""

    def add(self, prompt: list[int], max_tokens: int, memory: str) -> str:
        """Adds a request, and returns its id."""

    def step(self) -> Iterable[tuple[str, list[int], bool]]:
        """The id, the new tokens, and whether it has ended, of each request that the step wrote for."""

    def abort(self, requests: Iterable[str]) -> None:
        """Ends requests before their ends."""


@dataclasses.dataclass(slots=True)
class _Timed:
    """A request and when its tokens came; times are of `time.perf_counter`."""

    sent_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    first_tokens: int = 0
    tokens: int = 0

    def note(self, written: int) -> None:
        if written:
            self.last_at = time.perf_counter()
            if not self.tokens:
                self.first_at, self.first_tokens = self.last_at, written
            self.tokens += written

    def times(self) -> tuple[float, float, int, int]:
        return self.first_at - self.sent_at, self.last_at - self.first_at, self.first_tokens, self.tokens


def generate(engine: StepEngine, prompt: list[int], max_tokens: int, memory: str = "") -> dict[str, Any]:
    """The greedy answer to one prompt."""
    engine.use(memory)
    started = time.perf_counter()
    running = {engine.add(prompt, max_tokens, memory)}
    tokens: list[int] = []
    steps = 0
    while running:
        for request, written, ended in engine.step():
            tokens += written
            steps += bool(written)
            running -= {request} if ended else set()
    return {"tokens": tokens, "seconds": time.perf_counter() - started, "steps": steps}


def learn(engine: StepEngine, prompts: list[list[int]], max_tokens: int, memory: str) -> dict[str, Any]:
    """Answers all prompts, which drafts then know."""
    engine.use(memory)
    started = time.perf_counter()
    running = {engine.add(prompt, max_tokens, memory) for prompt in prompts}
    while running:
        running -= {request for request, _, ended in engine.step() if ended}
    return {"seconds": time.perf_counter() - started}


def load_test(
    engine: StepEngine, prompts: list[list[int]], max_tokens: int, streams: int, seconds: float, memory: str = ""
) -> dict[str, Any]:
    """Keeps `streams` requests running for `seconds`; counts the tokens that they get, and times each request.

    Drafts that remember answers are asked each prompt once: the window ends with the prompts.
    """
    engine.use(memory)
    waiting = iter(prompts) if memory else itertools.cycle(prompts)
    running: dict[str, _Timed] = {}
    timed: list[_Timed] = []

    def begin(count: int) -> None:
        for prompt in itertools.islice(waiting, count):
            timed.append(_Timed(time.perf_counter()))
            running[engine.add(prompt, max_tokens, memory)] = timed[-1]

    def step() -> tuple[int, int]:
        """The tokens that were written, and for how many requests."""
        written = 0, 0
        for request, tokens, ended in engine.step():
            running[request].note(len(tokens))
            written = written[0] + len(tokens), written[1] + bool(tokens)
            if ended:
                del running[request]
        return written

    begin(streams)
    count = steps = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds and len(running) == streams:
        tokens, requests = step()
        count, steps = count + tokens, steps + requests
        begin(streams - len(running))
    while not all(request.tokens for request in running.values()):  # a slow first token counts too
        step()
    engine.abort([*running])
    return {"tokens": count, "seconds": elapsed, "steps": steps, "requests": [request.times() for request in timed]}


_OF_STEP_ENGINES: dict[str, Callable[..., dict[str, Any]]] = {
    "generate": generate,
    "learn": learn,
    "load_test": load_test,
}


def main(module: str) -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries print there
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            if operation == "load":
                engine = importlib.import_module(module).Engine(request)
                answer: dict[str, Any] = {"version": engine.version}
            elif hasattr(engine, operation):
                answer = getattr(engine, operation)(**request)
            else:
                answer = _OF_STEP_ENGINES[operation](engine, **request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1])
