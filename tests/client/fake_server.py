"""A scripted server: a list of behaviours, one for each attempt at `GenerateStream`. Runs on port 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Self

import grpc
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

Events = Iterator[pb.GenerateStreamResponse]
Behaviour = Callable[[pb.GenerateRequest, Any, "FakeServer"], Events]
WAIT_SECONDS = 60.0
"""For what happens at once, unless the machine has much else to do."""


def answers(
    *texts: str, drafted: Sequence[bool] = (), stop_string: str = "", turns: threading.Semaphore | None = None
) -> Behaviour:
    """Started, one delta per text, Finished. With `turns`, each delta waits until they are released once more."""

    def behave(request: pb.GenerateRequest, context: Any, server: FakeServer) -> Events:
        yield started(request, *server.arm)
        for number, text in enumerate(texts):
            assert turns is None or turns.acquire(timeout=WAIT_SECONDS)
            yield delta(request, text, drafted[number] if drafted else number > 0)
        yield finished(len(texts), stop_string)

    return behave


def calls(reasoning: str, text: str, *called: tuple[str, Sequence[str]]) -> Behaviour:
    """An answer with a thought, a text and calls, each with its arguments in pieces."""

    def behave(request: pb.GenerateRequest, context: Any, server: FakeServer) -> Events:
        yield started(request)
        parts = [pb.Part(reasoning=reasoning), pb.Part(text=text)]
        for index, (name, pieces) in enumerate(called):
            parts.append(pb.Part(tool_call=pb.ToolCallDelta(index=index, id=f"c{index}", name=name)))
            parts += [pb.Part(tool_call=pb.ToolCallDelta(index=index, arguments=piece)) for piece in pieces]
        for part in parts:
            yield pb.GenerateStreamResponse(delta=pb.Delta(parts=[part], token_ids=[1]))
        end = finished(len(parts), "")
        end.finished.samples[0].reason = pb.FINISH_REASON_TOOL_CALLS
        yield pb.GenerateStreamResponse(delta=pb.Delta(result=end.finished.samples[0]))
        yield end

    return behave


def fails(
    code: grpc.StatusCode, text: str, *details: message.Message, pushback: str | None = None, after: Sequence[str] = ()
) -> Behaviour:
    """Ends with an error status, after Started and a delta per text of `after`, if there are any."""

    def behave(request: pb.GenerateRequest, context: Any, server: FakeServer) -> Events:
        if after:
            yield started(request)
        for said in after:
            yield delta(request, said, drafted=False)
        abort(context, code, text, *details, pushback=pushback)

    return behave


def hangs(*texts: str) -> Behaviour:
    """Started and a delta per text, then nothing until the client disconnects."""

    def behave(request: pb.GenerateRequest, context: Any, server: FakeServer) -> Events:
        yield started(request)
        for number, text in enumerate(texts):
            yield delta(request, text, drafted=number > 0)
        yield from silent(request, context, server)

    return behave


def silent(request: pb.GenerateRequest, context: Any, server: FakeServer) -> Events:
    """Nothing, not even Started, until the client disconnects."""
    gone = threading.Event()
    if context.add_callback(gone.set):
        gone.wait(WAIT_SECONDS)
    yield from ()


def abort(context: Any, code: grpc.StatusCode, text: str, *details: message.Message, pushback: str | None) -> None:
    status = status_pb2.Status(code=code.value[0], message=text)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailer = {
        **({"grpc-status-details-bin": status.SerializeToString()} if details else {}),
        **({"grpc-retry-pushback-ms": pushback} if pushback else {}),
    }
    context.set_trailing_metadata(tuple(trailer.items()))
    context.abort(code, text)


def reason(name: str, **metadata: str) -> Any:
    return error_details_pb2.ErrorInfo(reason=name, domain="draftwood", metadata=metadata)


def retry_in(milliseconds: int) -> Any:
    return error_details_pb2.RetryInfo(retry_delay=timedelta(milliseconds=milliseconds))


def violation(field: str, description: str) -> Any:
    violated = error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
    return error_details_pb2.BadRequest(field_violations=[violated])


def started(request: pb.GenerateRequest, experiment: str = "", arm: str = "") -> pb.GenerateStreamResponse:
    own: Any = {"request_id": request.request_id or "server-made", "tenant": request.tenant or "default"}
    event = pb.Started(
        model="fake", strategy="trie", prompt_tokens=3, max_tokens=100, experiment=experiment, arm=arm, **own
    )
    return pb.GenerateStreamResponse(started=event)


def delta(request: pb.GenerateRequest, text: str, drafted: bool) -> pb.GenerateStreamResponse:
    event = pb.Delta(parts=[pb.Part(text=text)], token_ids=[len(text)])
    if request.output.token_details:
        event.details.add(text=text, drafted=drafted)
    if request.output.draft_trees:
        event.draft_trees.add(token_ids=[7, 8], tokens=["a", text], parents=[-1, -1], accepted=[1] if drafted else [])
    return pb.GenerateStreamResponse(delta=event)


def finished(tokens: int, stop_string: str) -> pb.GenerateStreamResponse:
    end = pb.SampleResult(reason=pb.FINISH_REASON_STOP, usage=pb.SampleUsage(completion_tokens=tokens))
    if stop_string:
        end.stop_string = stop_string
    event = pb.Finished(samples=[end], usage=pb.Usage(prompt_tokens=3, completion_tokens=tokens))
    event.timings.queue.FromMilliseconds(250)
    event.timings.prefill.FromMilliseconds(500)
    event.timings.decode.FromMilliseconds(1250)
    counts: Any = {"draft_tokens": 8, "accepted_tokens": 2}
    by_source = {"trie": pb.SourceStatistics(**counts)}
    drafting = pb.DraftStatistics(
        mean_acceptance_length=1.5, steps=4, accepted_by_depth=[2, 1], by_source=by_source, **counts
    )
    drafting.draft_duration.FromMilliseconds(125)
    event.drafting.CopyFrom(drafting)
    return pb.GenerateStreamResponse(finished=event)


class Running:
    """A server of gRPC that runs while its context lasts."""

    _server: grpc.Server

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        assert self._server.stop(None).wait(WAIT_SECONDS)


class FakeServer(Running, GenerationServiceServicer):
    """Attempt n gets behaviour `script[n]`; attempts beyond the script get its last behaviour.

    Attributes:
        requests: what came, one for each attempt.
        metadata: the headers of each attempt at any method.
        seconds_left: until the deadline of each `GenerateStream` when it came; None for one without.
        arrived: set when a `GenerateStream` has come.
        cancelled: set when a client disconnected from an unfinished `GenerateStream`.
        arm: experiment and arm of the requests.
        unavailable_calls: so many unary calls are refused first.
        tool_format: how the model writes calls; None for one that takes no tools.
        options: gRPC arguments of the server.
        address: "host:port" to listen on.
    """

    def __init__(
        self,
        *,
        credentials: grpc.ServerCredentials | None = None,
        options: Sequence[tuple[str, int]] = (),
        address: str = "127.0.0.1:0",
    ) -> None:
        self.script: list[Behaviour] = [answers("Hello", ", wörld", "!")]
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.seconds_left: list[float | None] = []
        self.arrived = threading.Event()
        self.cancelled = threading.Event()
        self.arm = ("", "")
        self.unavailable_calls = 0
        self.has_chat_template = True
        self.tool_format: pb.ToolFormat | None = None
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0), *options])
        add_GenerationServiceServicer_to_server(self, self._server)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_ready(True)
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self.target = f"{address.partition(':')[0]}:{self.port}"

    def set_ready(self, ready: bool) -> None:
        """What its health service reports."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set(pb.DESCRIPTOR.services_by_name["GenerationService"].full_name, status)

    def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> Events:
        ended = threading.Event()
        context.add_callback(lambda: None if ended.is_set() else self.cancelled.set())
        self._note(context)
        self.seconds_left.append(left if (left := context.time_remaining()) is not None and left < 1e8 else None)
        self.requests.append(request)
        self.arrived.set()
        behaviour = self.script[min(len(self.requests), len(self.script)) - 1]
        try:
            yield from behaviour(request, context, self)
        finally:
            if context.is_active():
                ended.set()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        raise NotImplementedError  # no client of ours calls it

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self._note(context)
        text = request.text or "".join(
            f"<{turn.role}>{''.join(part.text for part in turn.content)}" for turn in request.chat.messages
        )
        return pb.TokenizeResponse(token_ids=[ord(character) for character in text], tokens=list(text))

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        self._note(context)
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        self._note(context)
        return pb.GetModelInfoResponse(
            model="fake",
            architecture="FakeForCausalLM",
            parameters=6_000_000,
            dtype="bfloat16",
            weights="int8",
            strategies=["none", "trie"],
            default_strategy="trie",
            has_chat_template=self.has_chat_template,
            eos_token_ids=[2],
            tool_format=self.tool_format,
            draft_models=[
                pb.DraftModel(strategy="head", name="h", parameters=2_000_000),
                pb.DraftModel(strategy="draft_model", name="org/m", parameters=3),
            ],
            no_tools_reason="" if self.tool_format else "the template shows no tools",
        )

    def _note(self, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        if self.unavailable_calls > 0:
            self.unavailable_calls -= 1
            abort(context, grpc.StatusCode.UNAVAILABLE, "the model is loading", reason("LOADING"), pushback=None)
