"""A request as it was asked: prompt, sampling, stop conditions, drafting. Frozen and picklable."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from draftwood_model_runner.errors import InvalidValueError
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.drafting import UNDRAFTED, Drafting

MAX_LOGPROBS = 20
MAX_PRIORITY = 10
LEAST_TEMPERATURE = 1e-5
"""Below it decoding is greedy, as in vLLM: scores over the temperature would leave float32's range."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from the logits of the model. The defaults are greedy decoding.

    Attributes:
        temperature: 0.0 for greedy decoding; one below `LEAST_TEMPERATURE` becomes 0.0.
        logit_bias: (token, value) pairs; the value is added to the logit of the token.
        logprobs: report log-probabilities, and those of this many most probable tokens; None to report none.

    Raises:
        InvalidValueError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 1e-5, 100.0),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidValueError(f"sampling.{name}", value, f"it must lie in [{low:g}, {high:g}]")
        if self.top_p == 0.0:
            raise InvalidValueError("sampling.top_p", 0.0, "it must be above 0")
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k < 0:
            raise InvalidValueError("sampling.top_k", self.top_k, "it must be at least 0 (0 keeps every token)")
        if not 0 <= self.seed < 2**64:
            raise InvalidValueError("sampling.seed", self.seed, "it must lie in [0, 2^64)")
        for token, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise InvalidValueError(f"sampling.logit_bias[{token}]", bias, "it must lie in [-100, 100]")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidValueError("output.top_logprobs", self.logprobs, f"it must lie in [0, {MAX_LOGPROBS}]")


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends.

    Attributes:
        max_tokens: at most this many new tokens (>= 1).
        min_tokens: no end-of-sequence or stop token before this many new tokens.
        strings: the output ends before the first of these.
        token_ids: tokens that end the sequence, besides the end-of-sequence tokens of the model.
        ignore_eos: end-of-sequence tokens of the model are ordinary tokens.

    Raises:
        InvalidValueError: a value is outside its range.
    """

    max_tokens: int
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidValueError("stop.max_tokens", self.max_tokens, "it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidValueError(
                "stop.min_tokens", self.min_tokens, f"it must lie in [0, max_tokens = {self.max_tokens}]"
            )
        if "" in self.strings:
            raise InvalidValueError("stop.strings", "", "a stop string must not be empty")


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Format:
    """The source text of a grammar that an output follows."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Limits and contents of the memory of a request. None: as the server's settings say.

    Attributes:
        forked: a memory of an arm that holds nothing yet begins with what its tenant's has.
        with_prompts: an answer is kept together with its prompt.
        max_tokens, max_bytes: of the memory; at most the server's.
        idle_ttl: seconds after its last record until the memory is deleted.
        max_age: seconds until a record is dropped; at most the server's.
    """

    forked: bool = False
    with_prompts: bool = False
    max_tokens: int | None = None
    max_bytes: int | None = None
    idle_ttl: float | None = None
    max_age: float | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Request:
    """One sample that a client asked for.

    Attributes:
        prompt: int32[p], p >= 1.
        learns: strategies may learn from the request; if not, one that is not `SupportsReadOnly` drafts nothing for it.
        format: the grammar that the output follows; None for any output.
        include_special_tokens: the text of special tokens is part of the output text.
        tenant: owner of the request. Tenants share the engine by weight and never share cached prefixes.
        priority: in [-10, 10]; orders the tenant's own requests and the choice of preemption victims, higher first.
        deadline: the request is aborted after this time, on the clock of `time.perf_counter`; None for no limit.
        arrived_at: when it arrived, on the same clock.
        arm: the arm of an experiment, which has a memory and metrics of its own; "" outside of one.
        memory: what its memory is and keeps.
        draft_trees: its outputs have the verified drafts.
        sample: which one it is of the samples that the client asked for.

    Raises:
        InvalidValueError: a value is outside its range.
    """

    request_id: str
    prompt: Int32Array
    stop: StopParams
    sampling: SamplingParams = SamplingParams()
    drafting: Drafting = UNDRAFTED
    learns: bool = True
    format: Format | None = None
    include_special_tokens: bool = False
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    arrived_at: float = field(default_factory=time.perf_counter)
    arm: str = ""
    memory: MemoryOptions = MemoryOptions()
    draft_trees: bool = False
    sample: int = 0

    def __post_init__(self) -> None:
        if self.prompt.dtype != np.int32 or self.prompt.ndim != 1 or self.prompt.size == 0:
            raise InvalidValueError("prompt", self.prompt, "it must be a non-empty int32[p] array")
        if abs(self.priority) > MAX_PRIORITY:
            raise InvalidValueError("priority", self.priority, f"it must lie in [{-MAX_PRIORITY}, {MAX_PRIORITY}]")
        if self.deadline is not None and math.isnan(self.deadline):
            raise InvalidValueError("deadline", self.deadline, "it must be a time")
