"""An engine and a model that follow a script, in milliseconds and without torch; and a server around them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import grpc
import numpy as np

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc as pb_grpc
from draftwood_memory.memory import Memory, opened_memory
from draftwood_model_runner.engine_config import Abilities
from draftwood_model_runner.errors import EngineStoppedError, InvalidInputError
from draftwood_model_runner.output import Answer as FinishedAnswer
from draftwood_model_runner.output import Difference, Finish, FinishReason, StepOutput
from draftwood_model_runner.request import GrammarKind
from draftwood_model_runner.sampling.generation_defaults import GenerationDefaults
from draftwood_model_runner.sequence import EngineCounts, Grammar, KVUse, Sequence, SequenceState, StateUse
from draftwood_service.engine.bridge import EngineBridge
from draftwood_service.engine.loaded import LoadedEngine, StepEngine
from draftwood_service.quotas.shared import SharedLimiter
from draftwood_service.rpc.bound import BoundServer
from draftwood_service.rpc.server import RunningServer
from draftwood_service.serving import ServedModel
from draftwood_service.settings import Settings
from draftwood_service.telemetry import opened_telemetry
from draftwood_service.tools import NoToolFormatError, ReasoningFormat, ToolFormat
from draftwood_strategies import Drafter
from draftwood_strategies.arrays import Int32Array
from tests.service.engine_thread import EngineThread

T = TypeVar("T")


class Bytes:
    """The bytes of tokens that are bytes."""

    special = frozenset({0})
    special_ids: ClassVar = {"<end>": 0}

    def __call__(self, token: int) -> bytes:
        return b"<end>" if token in self.special else bytes([token])

    def text(self, token: int) -> str:
        return self(token).decode(errors="replace")


class ByteTokenizer:
    """A token is a byte.

    Attributes:
        tool_format: set one for a model that takes tools.
        reasoning_format: set one for a model that thinks before it answers.
        takes_system: clear it for a chat template without system messages.
        template_variables: that its chat template reads.
        messages, tools, variables: of the last conversation that was read.
    """

    def __init__(self, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.takes_system = True
        self.tool_format: ToolFormat | NoToolFormatError = NoToolFormatError("its chat template has no tools")
        self.reasoning_format: ReasoningFormat | None = None
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] | None = None
        self.template_variables = frozenset[str]()
        self.variables: Mapping[str, Any] = {}
        self.encoded_on: list[str] = []
        self.token_bytes = Bytes()

    def encode(self, text: str) -> Int32Array:
        self.encoded_on.append(threading.current_thread().name)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Int32Array:
        self.messages, self.tools, self.variables = messages, tools, variables
        return self.encode(self.render(messages, tools))

    def decode(self, ids: SequenceOf[int] | Int32Array, include_special_tokens: bool = False) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": b"{}", "tokenizer_config.json": bytes(200_000)}

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    def without_special_tokens(self, text: str) -> str:
        return text


@dataclass(frozen=True, kw_only=True)
class FakeModel(ServedModel):
    name: str = "fake"
    architecture: str = "FakeForCausalLM"
    parameters: int = 1000
    dtype: str = "float32"
    weights: str = "float32"
    device: str = "cpu"
    exact: bool = True
    runner_name: str = "torch"
    runner_reason: str = "it was asked for"
    abilities: Abilities = Abilities()
    fingerprint: str = "f" * 16
    vocab_size: int = 256
    max_context: int = 4096
    eos_token_ids: frozenset[int] = frozenset({0})
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    grammars: FakeGrammars = field(default_factory=lambda: FakeGrammars())

    @property
    def tool_format(self) -> ToolFormat | NoToolFormatError:
        return self.tokenizer.tool_format

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        return self.tokenizer.reasoning_format


class FakeGrammars:
    """Refuses every grammar."""

    def compile(self, kind: GrammarKind, text: str) -> Grammar:
        raise InvalidInputError(f"format.{kind.value}", None, "not a valid grammar")

    def check(self, kind: GrammarKind, text: str) -> None:
        self.compile(kind, text)


class FakeEngine:
    """Writes `tokens_per_step` bytes "abc..." a step for each running sequence, up to its max_tokens.

    Attributes:
        gate: cleared, the next step waits for it to be set.
        may_load: cleared, an engine that is restarted waits for it to be set.
        step_seconds: what a step takes.
        step_error: raised by the next step.
        sequence_error: ends every sequence in the next step.
        add_error: raised by the next `add`.
        redecoding_error: raised by each step of an audit.
        closing_error: raised when an audit is closed.
        difference: what audits find.
        own_text: what it writes by itself while it is idle.
        hold_redecoding_at: an audit clears the gate before the step of this number, once.
        text: the text of each token; None takes a letter.
        script: the whole answer, a token for each character; None for one as long as it may be.
    """

    def __init__(self, max_running: int = 4) -> None:
        self.max_running = max_running
        self.tokens_per_step = 2
        self.step_seconds = 0.001
        self.gate = threading.Event()
        self.gate.set()
        self.may_load = threading.Event()
        self.may_load.set()
        self.step_error: Exception | None = None
        self.sequence_error: Exception | None = None
        self.add_error: Exception | None = None
        self.text: str | None = None
        self.script: str | None = None
        self.steps = 0
        self.in_step = False
        self.most_running = 0
        self.closed = False
        self.redecodings: list[FakeRedecoding] = []
        self.redecoding_error: Exception | None = None
        self.closing_error: Exception | None = None
        self.difference: Difference | None = None
        self.own_text: FakeOwnText | None = None
        self.hold_redecoding_at: int | None = None
        self.threads: set[int] = set()
        self.added: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._drafters: dict[Sequence, Drafter | None] = {}
        self._paused: dict[Sequence, Drafter | None] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._drafters)

    @property
    def idle(self) -> bool:
        return not self.has_work

    @property
    def counts(self) -> EngineCounts:
        return EngineCounts(self.steps, self.steps * self.step_seconds)

    @property
    def kv_use(self) -> KVUse:
        return KVUse(64, len(self._drafters), 0)

    @property
    def state_use(self) -> StateUse:
        return StateUse(1024 * len(self._drafters), 0)

    @property
    def running(self) -> int:
        return len(self._drafters)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def paused(self) -> int:
        return len(self._paused)

    def add(self, sequence: Sequence) -> None:
        self.added.append(sequence)
        self.threads.add(threading.get_ident())
        if self.add_error is not None:
            raise self.add_error
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)  # raises if it was never added, as the engine does
        self._free(sequence)

    def pause(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._paused[sequence] = self._drafters.pop(sequence)
            sequence.state = SequenceState.PAUSED
            sequence.stats.pauses += 1

    def resume(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.PAUSED:
            sequence.state = SequenceState.WAITING
            self._waiting.append(sequence)

    def step(self) -> list[StepOutput]:
        self.threads.add(threading.get_ident())
        self.in_step = True
        self.gate.wait()
        time.sleep(self.step_seconds)
        self.steps += 1
        if self.step_error is not None:
            raise self.step_error
        while self._waiting and len(self._drafters) < self.max_running:
            self._admit(self._waiting.pop(0))
        self.most_running = max(self.most_running, len(self._drafters))
        outputs = [self._write(sequence) for sequence in tuple(self._drafters)]
        self.in_step = False
        return outputs

    def redecode(self, answer: FinishedAnswer) -> FakeRedecoding:
        self.redecodings.append(FakeRedecoding(self, answer))
        return self.redecodings[-1]

    def close(self) -> None:
        self.closed = True
        self._waiting.clear()
        for sequence in (*self._drafters, *self._paused):
            self._free(sequence)

    def check(self) -> None:
        """Asserts that nothing is held for a sequence that ended."""
        assert all(sequence.state is SequenceState.RUNNING for sequence in self._drafters)
        assert all(sequence.state is SequenceState.WAITING for sequence in self._waiting)
        assert not self._paused

    def _admit(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        if sequence in self._paused:
            self._drafters[sequence] = self._paused.pop(sequence)
            return
        sequence.stats.first_scheduled_at = time.perf_counter()
        strategy = sequence.strategy
        self._drafters[sequence] = None if strategy is None else strategy.start(sequence.request.prompt)

    def _free(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.FINISHED
        drafter = self._paused.pop(sequence, None) or self._drafters.pop(sequence, None)
        if drafter is not None:
            drafter.close()

    def _write(self, sequence: Sequence) -> StepOutput:
        if self.sequence_error is not None:
            self._free(sequence)
            return StepOutput.failed(sequence, self.sequence_error)
        stats, written = sequence.stats, len(sequence.output)
        stats.first_token_at = stats.first_token_at or time.perf_counter()
        most = sequence.request.stop.max_tokens
        count = min(self.tokens_per_step, (most if self.script is None else min(most, len(self.script))) - written)
        tokens = [97 + (written + i) % 26 for i in range(count)]
        if self.script is not None:
            tokens = [ord(character) for character in self.script[written : written + count]]
        sequence.output += tokens
        stats.decode_steps += 1
        stats.proposed_tokens += 2 * (count - 1)
        stats.draft_tokens += 2 * (count - 1)
        stats.accepted_tokens += count - 1
        finish = None
        if len(sequence.output) in (most, None if self.script is None else len(self.script)):
            finish = Finish(FinishReason.LENGTH if len(sequence.output) == most else FinishReason.STOP)
            stats.finished_at = time.perf_counter()
            self._free(sequence)
        texts = [chr(token) if self.text is None else self.text for token in tokens]
        return StepOutput(sequence, tokens, texts, [True] * (count - 1) + [False], finish)


def scripted(text: str, form: ToolFormat | NoToolFormatError) -> tuple[FakeEngine, FakeModel]:
    """An engine that writes a text, and a model that thinks before it answers and writes calls of tools in a form."""
    engine, tokenizer = FakeEngine(), ByteTokenizer()
    engine.script, tokenizer.tool_format = text, form
    tokenizer.reasoning_format = ReasoningFormat("<think>", "</think>", opened_by_prompt=False)
    return engine, FakeModel(tokenizer=tokenizer)


class FakeRedecoding:
    """Compares a token a step."""

    def __init__(self, engine: FakeEngine, answer: FinishedAnswer) -> None:
        self.answer = answer
        self.done = self.closed = self.waits = False
        self.difference: Difference | None = None
        self.steps = 0
        self._engine = engine

    def step(self) -> None:
        assert not self.done
        assert not self._engine.has_work
        if self.steps == self._engine.hold_redecoding_at:
            self._engine.hold_redecoding_at = None
            self._engine.gate.clear()
        self._engine.gate.wait()
        if self._engine.redecoding_error is not None:
            raise self._engine.redecoding_error
        self.steps += 1
        if self.steps == len(self.answer.output):
            self.done, self.difference = True, self._engine.difference

    def close(self) -> None:
        self.done = self.closed = True
        if self._engine.closing_error is not None:
            raise self._engine.closing_error


class FakeOwnText:
    """Writes so many tokens, one a step.

    Attributes:
        error: raised by the next step.
    """

    def __init__(self, engine: FakeEngine, tokens: int) -> None:
        self.done = False
        self.steps = 0
        self.error: Exception | None = None
        self._engine, self._tokens = engine, tokens

    def step(self) -> None:
        assert not self.done
        assert not self._engine.has_work
        self._engine.gate.wait()
        if self.error is not None:
            raise self.error
        self.steps += 1
        self.done = self.steps == self._tokens

    def close(self) -> None:
        self.done = True


def rewrite(path: Path, text: str) -> None:
    """Changes a file at once: whoever follows it sees no half of it."""
    part = path.with_name(f"{path.name}.new")
    part.write_text(text)
    part.replace(path)


async def until(condition: Callable[[], bool]) -> None:
    """Waits until another thread or process makes a condition true; 20 s at most."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("the condition was not met within 20 s")


async def once(found: Callable[[], Awaitable[T]], is_right: Callable[[T], bool]) -> T:
    """What is found as soon as it is right; 20 s at most."""
    for _ in range(1000):
        if is_right(value := await found()):
            return value
        await asyncio.sleep(0.02)
    raise AssertionError(f"still {value}")


_calls: dict[int, _Call] = {}


def _call(number: int) -> _Call:
    return _calls[number]


@dataclass(eq=False)
class _Call:
    """An operation on the memories that calls a function on the engine's thread, and asks no store.

    Only its number is sent, as it stays in this process.
    """

    function: Callable[[], object]
    error: Exception | None = None

    def __reduce__(self) -> tuple[Callable[[int], _Call], tuple[int]]:
        return _call, (id(self),)

    async def run(self, memory: Memory) -> None:
        done: Future[None] = Future()
        memory.between_steps.run_on_engine(lambda: self._finish(done))
        await asyncio.wrap_future(done)

    def _finish(self, done: Future[None]) -> None:
        try:
            self.function()
        except Exception as error:
            self.error = error
        if done.set_running_or_notify_cancel():  # the memory's thread has not ended
            done.set_result(None)


async def on_engine_thread(bridge: EngineBridge, function: Callable[[], object]) -> None:
    """Calls a function on the engine's thread, between two steps. Messages that were sent before are processed then.

    Calls it on this thread if the engine's has ended. Raises what the function raises.
    """
    call = _Call(function)
    _calls[id(call)] = call
    try:
        async with asyncio.timeout(20):
            while True:
                try:
                    await bridge.run_operation(call)
                    break
                except EngineStoppedError:
                    if await asyncio.to_thread(bridge._runner.join, 0.1):  # else it ends, or is being restarted
                        function()
                        return
    finally:
        del _calls[id(call)]
    if call.error is not None:
        raise call.error


async def check_idle(bridge: EngineBridge, engine: Any) -> None:
    """Waits until no request is live, and asserts that the engine holds nothing for those of the past.

    Another thread would see half of a change: an idle engine audits answers, which takes pages and gives them back.
    """

    def check() -> None:
        assert (engine.running, engine.waiting) == (0, 0)
        engine.check()

    assert await bridge.wait_idle(10.0)
    await on_engine_thread(bridge, check)


@dataclass
class Served:
    """A server around a FakeEngine, and a channel to it."""

    server: RunningServer
    engine: FakeEngine
    model: FakeModel
    memory: Memory
    channel: grpc.aio.Channel
    stub: pb_grpc.GenerationServiceAsyncStub

    async def answer(self, request: pb.GenerateRequest, **options: Any) -> Answer:
        """Asks for an answer, and reads it to its end."""
        return await answer(self.stub.GenerateStream(request, **options))

    async def assert_idle(self) -> None:
        """Waits until no request is live, and asserts that none holds anything."""
        await check_idle(self.server.bridge, self.engine)
        assert self.server.bridge.live == 0


async def started_server(
    settings: Settings,
    model: ServedModel,
    make_engine: Callable[[], StepEngine],
    on_memory: Callable[[Memory], None] | None = None,
) -> RunningServer:
    """A server on a free port, its engine on a thread of this process."""
    bound = BoundServer(settings, opened_telemetry(settings))
    server = RunningServer(bound, model, await started_bridge(settings, model, make_engine, on_memory))
    await server.start()
    return server


async def started_bridge(
    settings: Settings,
    model: ServedModel,
    make_engine: Callable[[], StepEngine],
    on_memory: Callable[[Memory], None] | None = None,
) -> EngineBridge:
    """A bridge to an engine on a thread of this process."""
    runner = EngineThread(lambda: loaded_engine(settings, model, make_engine, on_memory))
    bridge = EngineBridge(runner, max_running=settings.max_running, max_waiting=settings.max_waiting)
    try:
        await bridge.start()
    except BaseException:
        await bridge.close()
        raise
    return bridge


@contextmanager
def loaded_engine(
    settings: Settings,
    model: ServedModel,
    make_engine: Callable[[], StepEngine],
    on_memory: Callable[[Memory], None] | None = None,
) -> Iterator[LoadedEngine]:
    """An engine with its memory manager, which `on_memory` is called with."""
    engine = make_engine()
    with opened_memory(settings.of_memory, model.fingerprint) as memory:
        if on_memory is not None:
            on_memory(memory)
        grammars: Any = model.grammars
        preload, strategy, share = settings.memory_preload, settings.strategy, settings.audit_share
        own_text = engine.own_text if isinstance(engine, FakeEngine) else None
        yield LoadedEngine(engine, memory, grammars, "info", preload, strategy, share, own_text=own_text)


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    model: FakeModel | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serves on a free port. On exit, asserts that nothing is held, and that the engine was closed."""
    engine = FakeEngine() if engine is None else engine
    model = FakeModel() if model is None else model

    def load() -> FakeEngine:
        engine.may_load.wait()
        return engine

    values: dict[str, object] = {"port": 0, "max_running": 4, "drain_grace": 0.05, "model_cache": False, **settings}
    memories: list[Memory] = []
    server = await started_server(Settings.model_validate(values), model, load, memories.append)
    if isinstance(server.limiter, SharedLimiter):
        server.limiter._answer_seconds = 5.0  # a busy machine's store may answer later than a request waits
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            served = Served(server, engine, model, memories[0], channel, pb_grpc.GenerationServiceStub(channel))
            yield served
            engine.gate.set()
            await served.assert_idle()
    finally:
        engine.gate.set()
        engine.may_load.set()
        await server.stop()
    assert await server.bridge.close(20.0)  # a stop waits for a second
    assert engine.closed
    assert not engine.has_work


@dataclass
class Answer:
    """A call's result: its events, and its status if it is not OK."""

    events: list[pb.GenerateStreamResponse] = field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None
    cancelled: bool = False

    @property
    def kinds(self) -> list[str | None]:
        return [event.WhichOneof("event") for event in self.events]

    @property
    def text(self) -> str:
        """Of all samples, without reasoning and calls."""
        return "".join(part.text for event in self.events for part in event.delta.parts)

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.delta.token_ids]

    @property
    def finished(self) -> pb.Finished:
        """The one Finished; asserts that it is the one end, and the last event."""
        assert self.error is None
        assert self.kinds.count("finished") == 1
        assert self.kinds[-1] == "finished"
        return self.events[-1].finished

    @property
    def status(self) -> grpc.aio.AioRpcError:
        """The one status; asserts that it is the one end."""
        assert "finished" not in self.kinds
        assert self.error is not None
        return self.error


async def answer(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateStreamResponse]) -> Answer:
    """Reads a call to its end."""
    result = Answer()
    try:
        while isinstance(event := await call.read(), pb.GenerateStreamResponse):
            result.events.append(event)
    except grpc.aio.AioRpcError as error:
        result.error = error
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        result.cancelled = True
    return result


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call, of a stream or of one response, that fails."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call is not refused")
