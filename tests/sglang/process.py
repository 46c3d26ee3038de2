"""A process of SGLang's scheduler, set up by its own function; our worker takes the place of its event loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest

LIMIT = 3.0
"""Seconds that a call into a strategy may take there."""
HANGING = "hanging"
"""A strategy there whose drafts return once, and then no more."""


@contextmanager
def scheduler_process() -> Iterator[Connection]:
    """Yields a pipe for `asked`; the process is then killed, as SGLang kills it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs,))
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "ready"
        yield ours
    finally:
        process.kill()
        process.join()


def asked(pipe: Connection, method: str, *arguments: Any) -> Any:
    """What a method of `_Scheduler` returns."""
    pipe.send((method, *arguments))
    assert pipe.poll(240), f"{method} does not return"
    return pipe.recv()


def _run(pipe: Connection) -> None:
    from draftwood_strategies import register
    from draftwood_strategies.draft_engine import guard
    from tests.sglang import conftest  # noqa: F401  # lets SGLang be imported
    from tests.sglang.harness import server_args

    guard.CALL_LIMIT = LIMIT
    register(HANGING)(_Hanging)
    args = server_args()
    from sglang.srt.managers import scheduler

    scheduler.Scheduler = lambda *_: _Scheduler(pipe)  # the whole of it needs a device
    scheduler.run_scheduler_process(args, None, 0, 0, 0, None, pipe)


class _Scheduler:
    """Does what it is asked on the thread that SGLang's scheduler steps on."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def get_init_info(self) -> str:
        return "ready"

    def run_event_loop(self) -> None:
        from tests.sglang.harness import learn_for, running_worker

        with pytest.MonkeyPatch.context() as patch, running_worker(patch) as self._worker:
            if self._worker.ngram_corpus.drafts is not None:
                learn_for(self._worker, "acme")
            while True:
                method, *arguments = self._pipe.recv()
                self._pipe.send(getattr(self, method)(*arguments))

    def answer(self, name: str, options: dict[str, Any]) -> int:
        """Tokens drafted for a request of the tenant "acme"."""
        from tests.sglang.harness import answered

        return answered(self._worker, name, draftwood_tenant="acme", **options)

    def break_drafting(self) -> None:
        """From now on it raises, as a defect of ours would."""
        self._worker.ngram_corpus.drafts.step = None


class _Hanging:
    """A strategy, and its drafter, which hangs behind the five drafts of a warm-up."""

    top_k = 0

    def __init__(self) -> None:
        self._drafts = 0

    def learn(self, tokens: Any) -> None:
        pass

    def start(self, prompt: Any) -> _Hanging:
        return self

    def propose(self, budget: int) -> Any:
        from draftwood_strategies.draft import DraftTree

        self._drafts += 1
        while self._drafts > 6:
            time.sleep(0.1)
        return DraftTree.of([1])

    def observe(self, accepted: Any, feedback: Any) -> None:
        pass

    def close(self) -> None:
        pass
