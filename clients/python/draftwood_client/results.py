"""A whole answer, joined from the events of its stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from draftwood.v1 import generation_pb2 as pb
from draftwood_client.convert import plain, seconds
from draftwood_client.grpc_errors import protocol_error


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context."""
    UNKNOWN = "unknown"
    """A reason of a newer server that this client does not know."""

    @classmethod
    def of(cls, end: pb.Finished | pb.SampleResult) -> FinishReason:
        """The reason in `GenerationStream.finished`, or in `Delta.finished`."""
        known = {pb.FINISH_REASON_STOP: cls.STOP, pb.FINISH_REASON_LENGTH: cls.LENGTH}
        return known.get(end.reason, cls.UNKNOWN)


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
    details: tuple[pb.TokenDetail, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """A whole answer: all deltas joined, with the fields of `Started` and `Finished`.

    With several samples, text, tokens, finish reason and details are those of the first one; `samples` contains all of
    them, and usage, timings and drafting cover all of them.

    Attributes:
        matched_stop: the stop string or stop token id that ended it; None without one.
        seed: a request with the same seed gets the same answer; None in greedy decoding.
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
    details: tuple[pb.TokenDetail, ...] = ()
    samples: tuple[Sample, ...] = ()
    experiment: str = ""
    arm: str = ""

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return (
            f"Completion({text!r}, {len(self.token_ids)} tokens, finish_reason={self.finish_reason.value!r}"
            + (f", matched_stop={self.matched_stop!r}" if self.matched_stop is not None else "")
            + (f", {len(self.samples)} samples" if self.samples else "")
            + f", mean_acceptance_length={self.drafting.mean_acceptance_length:.2f}, {self.timings.total:.3f} s"
            + f", request_id={self.request_id!r})"
        )


_TIMES = ("draft_time", "step_time", "model_time")


class Answer:
    """One answer, built from its events: at most one Started, deltas, one Finished."""

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self._deltas: list[pb.Delta] = []

    def take(self, event: pb.GenerateResponse) -> pb.Delta | None:
        """Adds an event; returns its delta if it is one. Ignores events of unknown kinds, and deltas without tokens,
        which keep up a cadence. The end of a sample counts.
        """
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "finished":
                self.finished = event.finished
            case "delta":
                delta = event.delta
                if delta.token_ids or delta.text or delta.HasField("finished"):
                    self._deltas.append(delta)
                    return delta
        return None

    def complete(self) -> tuple[pb.Started, pb.Finished]:
        """Raises `InternalError` if the stream ended with OK but without Started or Finished."""
        if self.started is None or self.finished is None:
            missing, request_id = ("Finished", self.started.request_id) if self.started else ("Started", "")
            raise protocol_error(f"the server ended the stream without {missing}", request_id)
        return self.started, self.finished

    def completion(self) -> Completion:
        """The whole answer. Raises `InternalError` if it is not complete."""
        started, finished = self.complete()
        timings, drafting = finished.timings, finished.drafting
        values = plain(drafting) | {name: seconds(getattr(drafting, name)) for name in _TIMES}
        values |= {"accepted_by_depth": (*drafting.accepted_by_depth,), "by_source": {**drafting.by_source}}
        first = self._sample(0, finished, started.seed if started.HasField("seed") else None)
        return Completion(
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            matched_stop=first.matched_stop,
            usage=finished.usage,
            timings=Timings(seconds(timings.queue), seconds(timings.prefill), seconds(timings.decode)),
            drafting=DraftStatistics(**values),
            request_id=started.request_id,
            model=started.model,
            tenant=started.tenant,
            seed=first.seed,
            details=first.details,
            samples=tuple(self._sample(index, end, end.seed) for index, end in enumerate(finished.samples)),
            experiment=started.experiment,
            arm=started.arm,
        )

    def _sample(self, index: int, end: pb.Finished | pb.SampleResult, seed: int | None) -> Sample:
        deltas = [delta for delta in self._deltas if delta.sample == index]
        stop = end.WhichOneof("matched_stop")
        return Sample(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish_reason=FinishReason.of(end),
            matched_stop=getattr(end, stop) if stop else None,
            seed=seed,
            details=tuple(detail for delta in deltas for detail in delta.details),
        )
