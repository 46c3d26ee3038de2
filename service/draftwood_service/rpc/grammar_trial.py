"""Tries grammars in processes of their own: one of 40 characters can take minutes and gigabytes to compile.

llguidance compiles what passes in at most the same time where it is used. What compiles may still lead to where nothing
is allowed, or beyond llguidance's limits: some answers are written at random, so that such a grammar is refused at once
rather than in the middle of an answer.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from draftwood_model_runner.errors import FormatsUnavailableError, InvalidInputError, InvalidValueError
from draftwood_model_runner.request import GrammarKind
from draftwood_model_runner.sampling.grammar import NICENESS
from draftwood_model_runner.sampling.grammar_compilation import AnswersAtRandom, Vocabulary, compiled

_CPU_SECONDS = 1.0
_MEMORY_BYTES = 256 * 2**20
"""Limits of compiling a grammar: a schema of 500 properties takes 0.06 s, one of 1,500 0.6 s."""


class GrammarTrials:
    """Checks grammars, each in one of as many processes as there are calls at once. From any thread.

    Args:
        vocabulary: the grammars' tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._idle: list[_Trial] = []
        self._first: Future[_Trial] | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Starts a process on another thread, so that the first call need not wait for all of that."""
        first: Future[_Trial] = Future()

        def start() -> None:
            try:
                first.set_result(_Trial(self._vocabulary))
            except (EOFError, OSError) as error:
                first.set_exception(error)

        self._first = first
        threading.Thread(target=start, name="draftwood-formats", daemon=True).start()

    def check(self, kind: GrammarKind, text: str) -> None:
        """Blocks until the grammar was compiled.

        Raises:
            InvalidValueError: it is not a grammar of that kind, takes too much time or memory, or leads to where
                nothing is allowed; gives the reason.
            FormatsUnavailableError: no process can be started.
        """
        try:
            trial = self._take() or _Trial(self._vocabulary)
        except (EOFError, OSError) as cause:
            raise FormatsUnavailableError from cause
        try:
            error = trial.run(kind, text)
        except (EOFError, OSError):
            problem = f"takes more than {_CPU_SECONDS:g} s of CPU time to compile"
            if trial.end() != -signal.SIGPROF:
                problem = f"cannot be compiled within {_MEMORY_BYTES >> 20} MiB"
            raise InvalidInputError(f"format.{kind.value}", None, problem) from None
        with self._lock:
            self._idle.append(trial)
        if error is not None:
            raise error

    def _take(self) -> _Trial | None:
        """A process that was started before; None if there is none."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            first, self._first = self._first, None
        with suppress(EOFError, OSError):  # it could not be started
            return None if first is None else first.result()
        return None

    def close(self) -> None:
        """Ends the processes that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
            first, self._first = self._first, None
        if first is not None:
            with suppress(EOFError, OSError):
                idle.append(first.result())
        for trial in idle:
            trial.end()


class _Trial:
    """One process; starts it and waits until it has the vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        try:
            self._connection.send(vocabulary)
            self._connection.recv()
        except (EOFError, OSError):  # it has ended
            self.end()
            raise

    def run(self, kind: GrammarKind, text: str) -> InvalidValueError | None:
        """Raises EOFError or OSError if the process ends."""
        self._connection.send((kind, text))
        error: InvalidValueError | None = self._connection.recv()
        return error

    def end(self) -> int:
        """The exit status of the process, once its connection is closed."""
        self._connection.close()
        return self._process.wait()


def main() -> None:
    """Compiles grammars until the connection is closed; ended by a signal if one takes too much."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    connection = Connection(int(sys.argv[1]))
    tokenizer = connection.recv().load()
    answers = AnswersAtRandom(tokenizer)
    _limit_memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send(None)
    with suppress(EOFError, OSError):
        while True:
            kind, text = connection.recv()
            connection.send(_problem(tokenizer, answers, kind, text))


def _problem(tokenizer: Any, answers: AnswersAtRandom, kind: GrammarKind, text: str) -> InvalidValueError | None:
    signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
    try:
        matcher = compiled(tokenizer, kind, text)
    except InvalidValueError as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return answers.problem(matcher, kind)


def _limit_memory() -> None:
    """Limits the growth of the process, where the system tells how large it is: on macOS time alone is bounded."""
    statistics = Path("/proc/self/statm")
    if statistics.exists():
        held = int(statistics.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY_BYTES, held + _MEMORY_BYTES))


if __name__ == "__main__":
    main()
