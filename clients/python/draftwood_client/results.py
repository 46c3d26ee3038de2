"""A whole answer, joined from the events of its stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from draftwood.v1 import generation_pb2 as pb
from draftwood_client.convert import plain, seconds
from draftwood_client.grpc_errors import protocol_error
from draftwood_client.messages import ToolCall


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context."""
    TOOL_CALLS = "tool_calls"
    """As `STOP`, with a call of a tool in the answer."""
    CANCELLED = "cancelled"
    """The server ended the answer; what was written is kept."""
    UNKNOWN = "unknown"
    """A reason of a newer server that this client does not know."""

    @classmethod
    def of(cls, result: pb.SampleResult) -> FinishReason:
        """The reason in `Delta.result`, or in one of `GenerationStream.finished.samples`."""
        return _REASONS.get(result.reason, cls.UNKNOWN)


_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


class Delta:
    """What some steps of an answer wrote.

    Attributes:
        message: of the protocol, with all of it.
    """

    __slots__ = ("message",)

    def __init__(self, message: pb.Delta) -> None:
        self.message = message

    def __repr__(self) -> str:
        return f"Delta({str(self.message)!r})"

    @property
    def text(self) -> str:
        """The next characters of the answer; "" if there are none yet."""
        return "".join([part.text for part in self.message.parts])

    @property
    def reasoning(self) -> str:
        """The next characters of what the model thinks before it answers."""
        return "".join([part.reasoning for part in self.message.parts])

    @property
    def tool_calls(self) -> list[pb.ToolCallDelta]:
        """Pieces of calls of tools: the first of each has its id and name, and all have the next of its arguments."""
        return [part.tool_call for part in self.message.parts if part.HasField("tool_call")]

    @property
    def sample(self) -> int:
        """Index of the sample that it belongs to, from 0."""
        return self.message.sample

    @property
    def token_ids(self) -> Sequence[int]:
        return self.message.token_ids

    @property
    def details(self) -> Sequence[pb.TokenDetail]:
        """One for each token, with the options `token_details` or `top_logprobs`."""
        return self.message.details

    @property
    def draft_trees(self) -> Sequence[pb.DraftTree]:
        """What the steps verified, with the option `draft_trees`."""
        return self.message.draft_trees

    @property
    def result(self) -> pb.SampleResult | None:
        """How the sample ended, in the last delta of it; None before."""
        return self.message.result if self.message.HasField("result") else None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from arrival to the first step, from there to the first token, and from there to the last token."""

    queue: float
    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.queue + self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class DraftStatistics:
    """Drafting statistics of one answer.

    Attributes:
        strategy: the drafting strategy; "none" if drafting was off.
        mean_acceptance_length: tokens per decoding step, the model's own included: 1.0 without drafts.
        steps: decoding steps, without prefill.
        draft_tokens: verified draft tokens.
        accepted_tokens: accepted draft tokens.
        accepted_by_depth: at index d, the number of steps that accepted at least d + 1 draft tokens.
        by_source: `draft_tokens` and `accepted_tokens` by the strategy that proposed them.
        draft_time: seconds spent drafting for this answer, learning included.
        step_time: seconds of the steps that this answer was part of.
        model_time: seconds of the model's forward passes in these steps.
        disabled_reason: why drafting was switched off during the answer; empty if it was not.
    """

    strategy: str
    mean_acceptance_length: float
    steps: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_depth: tuple[int, ...]
    by_source: Mapping[str, pb.SourceStatistics]
    draft_time: float
    step_time: float
    model_time: float
    disabled_reason: str

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified draft tokens that were accepted; 0.0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One of several answers to the same prompt, as in `Completion`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    seed: int | None
    usage: pb.SampleUsage
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    details: tuple[pb.TokenDetail, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """A whole answer: all deltas joined, with the fields of `Started` and `Finished`.

    With several samples, text, reasoning, calls, tokens, finish reason and details are those of the first one;
    `samples` contains all of them, and usage, timings and drafting cover all of them.

    Attributes:
        matched_stop: the stop string or stop token id that ended it; None without one.
        seed: a request with the same seed gets the same answer; None in greedy decoding.
        reasoning: what the model thought before it answered; empty for a model that writes none.
        tool_calls: that the model wrote, if the request has tools.
        details: one per token, with the option `token_details`.
        experiment, arm: the experiment that the request took part in, and its arm in it; empty if it was in none.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: pb.Usage
    timings: Timings
    drafting: DraftStatistics
    request_id: str
    model: str
    tenant: str
    seed: int | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    details: tuple[pb.TokenDetail, ...] = ()
    samples: tuple[Sample, ...] = ()
    experiment: str = ""
    arm: str = ""

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return (
            f"Completion({text!r}, {len(self.token_ids)} tokens, finish_reason={self.finish_reason.value!r}"
            + (f", matched_stop={self.matched_stop!r}" if self.matched_stop is not None else "")
            + (f", tool_calls={[call.name for call in self.tool_calls]!r}" if self.tool_calls else "")
            + (f", {len(self.samples)} samples" if self.samples else "")
            + f", mean_acceptance_length={self.drafting.mean_acceptance_length:.2f}, {self.timings.total:.3f} s"
            + f", request_id={self.request_id!r})"
        )


_TIMES = ("draft", "step", "model")


class Answer:
    """One answer, built from its events: at most one Started, deltas, one Finished."""

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self._deltas: list[pb.Delta] = []

    def take(self, event: pb.GenerateStreamResponse) -> Delta | None:
        """Adds an event; returns its delta if it is one. Ignores events of unknown kinds, and deltas without tokens and
        parts, which keep up a cadence. The end of a sample counts.
        """
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "finished":
                self.finished = event.finished
            case "delta":
                delta = event.delta
                if delta.token_ids or delta.parts or delta.HasField("result"):
                    self._deltas.append(delta)
                    return Delta(delta)
        return None

    def complete(self) -> tuple[pb.Started, pb.Finished]:
        """Raises `InternalError` if the stream ended with OK but without Started or Finished, or Finished is empty."""
        if self.started is None or self.finished is None or not self.finished.samples:
            missing, request_id = ("Finished", self.started.request_id) if self.started else ("Started", "")
            raise protocol_error(f"the server ended the stream without {missing}", request_id)
        return self.started, self.finished

    def completion(self) -> Completion:
        """The whole answer. Raises `InternalError` if it is not complete."""
        started, finished = self.complete()
        timings, drafting = finished.timings, finished.drafting
        values = plain(drafting)
        values |= {f"{name}_time": seconds(getattr(drafting, f"{name}_duration")) for name in _TIMES}
        for name in _TIMES:
            del values[f"{name}_duration"]
        values |= {"accepted_by_depth": (*drafting.accepted_by_depth,), "by_source": {**drafting.by_source}}
        samples = tuple(self._sample(index, end) for index, end in enumerate(finished.samples))
        first = samples[0]
        return Completion(
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            matched_stop=first.matched_stop,
            usage=finished.usage,
            timings=Timings(seconds(timings.queue), seconds(timings.prefill), seconds(timings.decode)),
            drafting=DraftStatistics(strategy=started.strategy, **values),
            request_id=started.request_id,
            model=started.model,
            tenant=started.tenant,
            seed=first.seed,
            reasoning=first.reasoning,
            tool_calls=first.tool_calls,
            details=first.details,
            samples=samples if len(samples) > 1 else (),
            experiment=started.experiment,
            arm=started.arm,
        )

    def _sample(self, index: int, end: pb.SampleResult) -> Sample:
        deltas = [delta for delta in self._deltas if delta.sample == index]
        parts = [part for delta in deltas for part in delta.parts]
        stop = end.WhichOneof("matched_stop")
        return Sample(
            text="".join(part.text for part in parts),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish_reason=FinishReason.of(end),
            matched_stop=getattr(end, stop) if stop else None,
            seed=end.seed if end.HasField("seed") else None,
            usage=end.usage,
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=_calls(part.tool_call for part in parts if part.HasField("tool_call")),
            details=tuple(detail for delta in deltas for detail in delta.details),
        )


def _calls(pieces: Iterable[pb.ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls that pieces make, in their order."""
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        begun = calls.get(piece.index, ToolCall(piece.name, "", piece.id))
        calls[piece.index] = ToolCall(begun.name, begun.arguments + piece.arguments, begun.id)
    return tuple(calls[index] for index in sorted(calls))
