"""The server's answers, as plain immutable values without protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from draftwood_client.tools import ToolFormat


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context."""
    UNKNOWN = "unknown"
    """A reason of a newer server that this client does not know."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that the model might have written, its log-probability, and its bytes as in `TokenDetail`."""

    token_id: int
    logprob: float
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """One token.

    Attributes:
        text: the characters that were sent with it: those that it completed, but for what may begin a stop string,
            which comes with a later one.
        drafted: whether it was accepted from a draft.
        logprob: its log-probability by the model's own logits; None without the option `top_logprobs`.
        top_logprobs: the most probable tokens, best first.
        token_bytes: the token itself: UTF-8 where it is whole characters, a special token's name.
        left_out: it is a special token, which the text is without. The bytes of the others together are the text.
    """

    text: str
    drafted: bool
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    token_bytes: bytes = b""
    left_out: bool = False


@dataclass(frozen=True, slots=True)
class DraftTree:
    """The draft tokens that one step verified.

    Attributes:
        token_ids: one for each node.
        tokens: the text of each; U+FFFD for a token that is part of a character.
        parents: index of each node's parent; -1 for the last token before the step.
        accepted: indexes of the accepted nodes, from the root down.
    """

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """All tokens of one step, or of several steps if the client reads more slowly than the model writes.

    Attributes:
        text: whole characters; the bytes of an unfinished one are in a later delta.
        token_ids: the tokens.
        details: one per token, with the option `token_details`.
        sample: index of the sample, from 0.
        draft_trees: of the steps, the last 64 at most, with the option `draft_trees`.
        finished: of several samples, the end of this one; such a delta may be without tokens. None before, and where a
            server sends deltas at a fixed cadence.
    """

    text: str
    token_ids: tuple[int, ...]
    details: tuple[TokenDetail, ...] = ()
    sample: int = 0
    draft_trees: tuple[DraftTree, ...] = ()
    finished: SampleFinished | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """The server admitted the request.

    Attributes:
        strategy: the drafting strategy; "none" if drafting is off.
        max_tokens: the largest number of tokens that the answer can have.
        seed: the seed of the answer; a request with the same seed gets the same answer. None in greedy decoding.
        experiment, arm: the experiment that the request takes part in, and its arm in it; empty if it is in none.
    """

    request_id: str
    model: str
    tenant: str
    strategy: str
    prompt_tokens: int
    max_tokens: int
    seed: int | None
    experiment: str = ""
    arm: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, of the answer, and of the prompt's prefix that was in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


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
class SourceStatistics:
    """Draft tokens proposed by one strategy and verified, and how many of them were accepted."""

    draft_tokens: int
    accepted_tokens: int


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
        by_source: counts by the strategy that proposed the token.
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
    by_source: Mapping[str, SourceStatistics]
    draft_time: float
    step_time: float
    model_time: float
    disabled_reason: str

    @property
    def acceptance_rate(self) -> float:
        """Share of the verified draft tokens that were accepted; 0.0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """The end of one of several samples, and the seed that generates it alone."""

    reason: FinishReason
    matched_stop: str | int | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer. With several samples, usage, timings and drafting cover all of them.

    Attributes:
        reason: finish reason, of the first sample.
        matched_stop: the stop string or stop token id that ended the first sample; None without one.
        samples: the ends of all samples, if there are several.
    """

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    drafting: DraftStatistics
    samples: tuple[SampleFinished, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One of several answers to the same prompt, as in `Completion`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    seed: int | None
    details: tuple[TokenDetail, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """A whole answer: all deltas joined, with the fields of `Started` and `Finished`.

    With several samples, text, tokens, finish reason and details are those of the first one; `samples` contains all of
    them, and usage, timings and drafting cover all of them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    drafting: DraftStatistics
    request_id: str
    model: str
    tenant: str
    seed: int | None
    details: tuple[TokenDetail, ...] = ()
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


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Token ids and the text of each; U+FFFD in the text of a token that is part of a character."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What holds where a request sets nothing, from the generation config of the model.

    Attributes:
        max_tokens: None for as many as fit the context.
        no_repeat_ngram_size: no run of so many tokens, the prompt's included, is written twice; 0 for any.
        bad_words: sequences of tokens that are not written.
        suppressed, suppressed_first: tokens that are not written, and that are not written first.
        forced_last: one of these is the last token of an answer that reaches max_tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    min_tokens: int = 0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    forced_last: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """What the engine of a server can do; requests for anything else are refused with `UNSUPPORTED_BY_ENGINE`.

    Attributes:
        engine: "draftwood" or "vllm"; "" from servers that do not tell.
        version: of vLLM; "" for Draftwood's own engine.
        reproducible_seeds: the same seed gives the same tokens.
        draft_trees: the verified drafts are shown to who asks for them.
        branching_drafts: drafts are trees; otherwise each is one chain of tokens.
        max_temperature, max_penalty: bounds of the temperature, and of presence and frequency penalties either way.
        max_logprobs: most probable tokens that are reported.
        formats: of answers, "json_schema", "regex", "lark".
        pauses: a request whose client does not read gives up its slot.
        preempts: a running request gives up its slot to one of a tenant that holds less for its weight.
        audits_samples: sampled answers are audited as well as greedy ones.
    """

    engine: str = ""
    version: str = ""
    reproducible_seeds: bool = True
    draft_trees: bool = True
    branching_drafts: bool = True
    min_p: bool = True
    logit_bias: bool = True
    max_temperature: float = 100.0
    max_penalty: float = 100.0
    max_logprobs: int = 20
    formats: tuple[str, ...] = ("json_schema", "regex", "lark")
    pauses: bool = True
    preempts: bool = True
    audits_samples: bool = True


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model and its limits.

    Attributes:
        max_context_tokens: prompt and answer together.
        max_draft_nodes: the server's limit of draft nodes per step.
        exact: logits are the same to the last bit with and without drafts, in any batch.
        runner: what computes the steps, "cuda", "openvino", "torch" or "vllm"; "" from servers that do not tell.
        runner_reason: why this runner was chosen.
        weights: what they are stored as: the dtype, "int8", "int4", or the quantization of the checkpoint, such as
            "torchao"; "" from servers that do not tell.
        tool_format: how the model writes calls of tools; None if it is given none.
        no_tools_reason: why it is given none.
        abilities: of the engine.
    """

    model: str
    architecture: str
    parameters: int
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    max_draft_nodes: int
    has_chat_template: bool
    strategies: tuple[str, ...]
    default_strategy: str
    eos_token_ids: tuple[int, ...]
    server_version: str
    exact: bool
    runner: str = ""
    runner_reason: str = ""
    weights: str = ""
    generation_defaults: GenerationDefaults = GenerationDefaults()
    tool_format: ToolFormat | None = None
    no_tools_reason: str = ""
    abilities: EngineAbilities = EngineAbilities()
