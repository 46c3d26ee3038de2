"""A model over several GPUs of a machine: one process for each, which all compute the same steps.

transformers shards the weights (`tp_plan="auto"`: Megatron-LM's columns and rows, Shoeybi et al., 2019) and adds up
what the ranks compute. Rank 0 schedules and drafts; the others get its batches, which are small arrays, choose the same
tokens from the same logits, and keep the same keys and values, of their own heads.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn, cast

from draftwood_model_runner.errors import DeviceLostError, DeviceMemoryError
from draftwood_model_runner.runners.base import (
    DraftLimits,
    KVCompaction,
    Predictions,
    RunnerFactory,
    StepBatch,
)
from draftwood_model_runner.runners.cuda.runner import Launcher
from draftwood_model_runner.runners.cuda.sampling import CudaStep, HostResults, Launched, Written, sampling_of
from draftwood_model_runner.sampling.metadata import SamplingMetadata
from draftwood_model_runner.sampling.token_sampler import TokenSampler

_log = logging.getLogger(__name__)
_RANK_LOST = 70
"""Exit status of a process that lost a rank: EX_SOFTWARE."""


class Ranks:
    """The other ranks, at rank 0. If one of them ends, so does this process, as no step can be computed any more.

    Args:
        size: of all ranks.
        worker: what the others run, importable by name: called with the receiving end of a pipe, and `arguments`.
    """

    def __init__(self, size: int, worker: Callable[..., None], *arguments: Any) -> None:
        port = _free_port()
        context = get_context("spawn")
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(1, size):
            theirs, ours = context.Pipe(duplex=False)
            process = context.Process(target=_run_rank, args=(rank, size, port, theirs, worker, arguments))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        _join(0, size, port)
        self._closed = False
        atexit.register(self.close)  # before multiprocessing waits for its processes
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()

    def send(self, command: tuple[Any, ...]) -> None:
        """To all other ranks."""
        for end in self._ends:
            end.send(command)

    def close(self) -> None:
        """Ends the other ranks; idempotent."""
        self._closed = True
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=10)

    def _watch(self) -> None:
        ranks: dict[object, int] = {process.sentinel: rank for rank, process in enumerate(self._processes, 1)}
        ended = wait([process.sentinel for process in self._processes])
        if not self._closed:
            _log.critical("rank %d of the model ended; no step can be computed without it", ranks[ended[0]])
            os._exit(_RANK_LOST)


@contextmanager
def _all_or_none() -> Iterator[None]:
    """Raises DeviceLostError if memory does not suffice here: the other ranks have computed the step."""
    try:
        yield
    except DeviceMemoryError as error:
        raise DeviceLostError(f"ranks have different results of a step: {error}") from error


class DriverStep:
    """Implements `sampling.Launched` on all ranks."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched

    @property
    def written(self) -> Written:
        return self._launched.written

    def wait(self) -> tuple[HostResults, float]:
        with _all_or_none():
            return self._launched.wait()

    def accept(self, row: int, nodes: list[int]) -> None:
        self._launched.accept(row, nodes)


class DriverRunner:
    """Implements `runners.base.Runner`: what it is asked for, all ranks do."""

    def __init__(self, runner: Launcher, ranks: Ranks, number: int) -> None:
        self._runner, self._ranks, self._number = runner, ranks, number
        self.pages: int = runner.pages
        self.page_size: int = runner.page_size
        self.is_asynchronous: bool = runner.is_asynchronous
        self.mixed_batches: bool = runner.mixed_batches

    def draft_limits(self, position: int) -> DraftLimits:
        return self._runner.draft_limits(position)

    def step(self, batch: StepBatch, top_k: int) -> Predictions:
        return self.launch(batch, top_k).wait()[0].predictions

    def begin(self, batch: StepBatch, top_k: int, samplers: SequenceOf[TokenSampler | None]) -> CudaStep:
        """Begins a step, see `Runner.begin`. Raises DeviceLostError if a device has no memory for it; so does
        `wait`."""
        sampling = sampling_of(batch, samplers).with_masks()
        return CudaStep(self, batch, samplers, sampling, self.launch(batch, top_k, sampling))

    def launch(self, batch: StepBatch, top_k: int, sampling: SamplingMetadata | None = None) -> DriverStep:
        """Launches a step on all ranks, see `CudaRunner.launch`."""
        self._ranks.send((self._number, "launch", batch, top_k, sampling))
        with _all_or_none():
            return DriverStep(self._runner.launch(batch, top_k, sampling))

    def compact_kv(self, moves: KVCompaction) -> None:
        self._ranks.send((self._number, "compact_kv", moves))
        with _all_or_none():
            self._runner.compact_kv(moves)


class DriverFactory:
    """Implements `runners.base.RunnerFactory` at rank 0."""

    def __init__(self, factory: RunnerFactory, ranks: Ranks) -> None:
        self._factory, self._ranks = factory, ranks
        self._numbers = itertools.count()
        self.name, self.exact, self.window = factory.name, factory.exact, factory.window

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes on one rank."""
        return self._factory.kv_bytes_per_token

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        """What fits the memory of this rank: devices are alike."""
        return self._factory.default_kv_tokens(context, sequences)

    def runner(self, kv_tokens: int, threads: int | None = None, sequences: int | None = None) -> DriverRunner:
        number = next(self._numbers)
        self._ranks.send((number, "runner", kv_tokens))
        return DriverRunner(cast(Launcher, self._factory.runner(kv_tokens)), self._ranks, number)


def run_commands(factory: RunnerFactory, commands: Connection) -> None:
    """Does what rank 0 does, until its end of the pipe is closed."""
    runners: dict[int, Any] = {}
    in_flight: Launched | None = None
    while True:
        try:
            number, name, *arguments = commands.recv()
        except EOFError:
            return
        if name == "runner":
            runners[number] = factory.runner(*arguments)
        elif name == "launch":
            launched = runners[number].launch(*arguments)
            if in_flight is not None:
                in_flight.wait()
            in_flight = launched
        else:
            getattr(runners[number], name)(*arguments)


def _run_rank(
    rank: int, size: int, port: int, commands: Connection, worker: Callable[..., None], arguments: tuple[Any, ...]
) -> NoReturn:
    """The process of a rank. It ends at once: a process group must not wait for a rank that was lost."""
    status = 1
    try:
        _join(rank, size, port)
        worker(commands, *arguments)
        status = 0
    except BaseException:
        _log.exception("rank %d failed", rank)
    os._exit(status)


def _join(rank: int, size: int, port: int) -> None:
    """Tells transformers, which starts the process group, by the variables that torchrun sets."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
