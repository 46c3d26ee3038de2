"""From a request to vLLM's: plain values of its `SamplingParams`, and the options of the plug-in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from draftwood_memory.engines.options import TRUSTED
from draftwood_model_runner.output import ENDING_DIFFERS, Answer, Difference, OutputText, TokenLogprobs
from draftwood_model_runner.request import MAX_LOGPROBS, Format, GrammarKind, Request
from draftwood_model_runner.sampling.generation_defaults import Constraints
from draftwood_model_runner.sampling.grammar_compilation import JSON_LAYOUT
from draftwood_service.engine.loaded import memory_overrides, repeat_key
from draftwood_strategies.drafting import UNDRAFTED

_FIELDS = {GrammarKind.REGEX: "regex", GrammarKind.LARK: "grammar"}


def params_of(request: Request, eos_token_ids: frozenset[int], constraints: Constraints) -> dict[str, Any]:
    """Arguments of `core.sampling_params`.

    Seeds are left out: with drafts they reproduce nothing in vLLM, and its CPU build fails for a seeded request whose
    prompt is read in pieces.

    Args:
        eos_token_ids: of the model.
        constraints: of the model's generation config; they do not hold with a format.
    """
    sampling, stop = request.sampling, request.stop
    holds = request.format is None
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "logprobs": sampling.logprobs,
        "max_tokens": stop.max_tokens,
        "min_tokens": stop.min_tokens,
        "ends": set(stop.token_ids if stop.ignore_eos else stop.token_ids | eos_token_ids),
        "forbidden": _forbidden(constraints) if holds else [],
        "grammar": None if request.format is None else _grammar(request.format),
        "extra_args": {TRUSTED: _drafting(request)},
    }


def _drafting(request: Request) -> dict[str, Any]:
    """As `draftwood_memory.engines.options.trusted_options` reads it."""
    return {
        "tenant": request.tenant,
        "drafting": [request.drafting.strategy, [*map(list, request.drafting.options)], request.drafting.max_nodes],
        "learns": request.learns,
        "arm": request.arm,
        "overrides": asdict(memory_overrides(request.memory)),
        "with_prompt": request.memory.with_prompts,
        "key": repeat_key(request),
        "sample": request.sample,
    }


def _forbidden(constraints: Constraints) -> list[list[int]]:
    return [*map(list, constraints.bad_words), *([token] for token in constraints.suppressed)]


def _grammar(chosen: Format) -> dict[str, str]:
    """The format as Draftwood's engine reads it."""
    if chosen.kind is not GrammarKind.JSON_SCHEMA:
        return {_FIELDS[chosen.kind]: chosen.text}
    schema = json.loads(chosen.text)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {**JSON_LAYOUT, **schema.get("x-guidance", {})}}
    return {"json": json.dumps(schema)}


class CoreOutput(NamedTuple):
    """What one step wrote for a request.

    Attributes:
        ended: why vLLM ended the request: "stop", "length", ...; "" while it goes on.
        began_at: when it was scheduled first, on the clock of `time.perf_counter`; 0.0 if that was not in this step.
        cached_prompt_tokens: in the first output; else None.
        draft_tokens: that were verified for it in all, in the last output of a request with drafts; else None.
    """

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    ended: str
    began_at: float
    preemptions: int
    cached_prompt_tokens: int | None
    draft_tokens: int | None


class CoreStep(NamedTuple):
    """A step of vLLM.

    Attributes:
        kv_use: part of the KV cache that live requests hold, from 0 to 1; None if vLLM does not say.
    """

    outputs: list[CoreOutput]
    kv_use: float | None


_LARGEST_LOGIT = 16.0
"""vLLM reports log-probabilities, and their differences are those of logits; margins are over the largest logit, which
is 10 to 30 for most models."""


class VllmRedecoding:
    """One answer, decoded again from its beginning while nothing else runs.

    Args:
        begin: gives a request to vLLM and returns its id there.
        abort: ends it.
        text: of the answer, from its beginning.

    Attributes:
        id: of the request in vLLM; "" while it is not there.
        done: all tokens were compared, or one differs.
        difference: the first one, if there is any.
    """

    def __init__(
        self,
        answer: Answer,
        begin: Callable[[Request], str],
        abort: Callable[[str], None],
        text: Callable[[Request], OutputText],
    ) -> None:
        sampling = replace(answer.request.sampling, logprobs=MAX_LOGPROBS)
        self.id = ""
        self.done = False
        self.difference: Difference | None = None
        self._request = replace(answer.request, sampling=sampling, drafting=UNDRAFTED, learns=False)
        self._answer = answer
        self._begin = begin
        self._abort = abort
        self._make_text = text
        self._text = text(self._request)
        self._compared = 0

    @property
    def waits(self) -> bool:
        """Its next step is vLLM's."""
        return bool(self.id) and not self.done

    def step(self) -> None:
        """Gives the request to vLLM."""
        if not self.id:
            self._text, self._compared = self._make_text(self._request), 0
            self.id = self._begin(self._request)

    def take(self, token_ids: list[int], logprobs: list[TokenLogprobs], ended: str) -> None:
        """Compares what a step of vLLM wrote."""
        written = self._answer.output
        for token, alternatives in zip(token_ids, logprobs, strict=False):
            if self.done:
                return
            if token != written[self._compared]:
                self._end(ended, Difference(self._compared, _margin(alternatives, written[self._compared])))
                return
            self._compared += 1
            _, finish = self._text.push(token)
            if finish is not None or self._compared == len(written):
                same = self._compared == len(written) and finish == self._answer.finish
                self._end(ended, None if same else Difference(self._compared, ENDING_DIFFERS))
        if ended and not self.done:
            self._end(ended, Difference(self._compared, ENDING_DIFFERS))

    def pause(self) -> None:
        """Ends its request in vLLM, since the engine has others to run; the audit starts over later."""
        if self.waits:
            self._abort(self.id)
            self.id = ""

    def close(self) -> None:
        """Ends it, finished or not; idempotent."""
        self.pause()
        self.done = True

    def _end(self, ended: str, difference: Difference | None) -> None:
        self.difference = difference
        self.done = True
        if not ended:
            self._abort(self.id)


def _margin(alternatives: TokenLogprobs, written: int) -> float:
    """By how much logits would have to be off, over the largest of them; at least so much if the token is none of the
    most probable ones."""
    known = dict(zip(alternatives.top_token_ids, alternatives.top_logprobs, strict=True))
    return abs(alternatives.logprob - known.get(written, alternatives.top_logprobs[-1])) / _LARGEST_LOGIT
