"""From the message of a request to the `Request`s of its samples. Errors name the field that is wrong.

`read_terms` reads once all that needs no work, before the request is admitted; `Terms.requests` adds the prompt. A rule
that the engine's own types check (`SamplingParams`, `StopParams`, `Request`) is not repeated here, except for stop
strings, so that the error names the one that is wrong.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.engine_config import Abilities
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.request import Format, MemoryOptions, Request, SamplingParams, StopParams
from draftwood_service.auth import PermissionDeniedError
from draftwood_service.errors import ContextLengthError, UnsupportedByEngineError
from draftwood_service.rpc.calls import Call
from draftwood_service.rpc.prompts import (
    Prompt,
    prompt_too_long,
    require_at_most,
    require_in_vocabulary,
    require_length,
)
from draftwood_service.serving import ServedModel, Serving
from draftwood_strategies.drafting import DraftChoice, Drafting, resolve
from draftwood_tenants.config import LearningScope, TenantConfig
from draftwood_tenants.experiments.arms import ArmAssignment
from draftwood_tenants.reading import sampling_values

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a message asks for, but for the tokens of its prompt.

    Attributes:
        message: it came in.
        tenant: of the call (see `Principal.tenant_for`), with its configuration.
        assignment: the arm; None outside of experiments.
        samples: number of answers.
        min_tokens: that it uses at least, or reserves, as far as the message tells without any work.
    """

    message: pb.GenerateRequest
    model: ServedModel
    tenant: str
    config: TenantConfig
    assignment: ArmAssignment | None
    samples: int
    sampling: SamplingParams
    drafting: Drafting
    min_tokens: int

    def requests(self, prompt: Prompt, answer_format: Format | None, call: Call, deadline: float) -> list[Request]:
        """One request for each sample.

        Args:
            deadline: on the clock of `time.perf_counter`.

        Raises:
            InvalidValueError: prompt and answer do not fit the context, or the engine's types refuse a value.
        """
        _require_known(prompt, self.model.vocab_size)
        learning, drafting = self.config.learning, self.message.drafting
        forked = self.assignment is not None and self.assignment.arm.forked
        first = Request(
            request_id=call.request_id,
            prompt=prompt.ids,
            stop=_stop(self.message, self.model, prompt),
            sampling=self.sampling,
            drafting=self.drafting,
            learns=(drafting.learn or not drafting.HasField("learn")) and learning.scope is not LearningScope.NOTHING,
            format=answer_format,
            include_special_tokens=self.message.output.include_special_tokens,
            tenant=self.tenant,
            priority=self.message.priority,
            deadline=deadline,
            arrived_at=call.arrived_at,
            arm="" if self.assignment is None else self.assignment.label,
            memory=MemoryOptions(
                with_prompts=learning.with_prompts, **asdict(replace(learning.overrides, forked=forked))
            ),
            draft_trees=self.message.output.draft_trees,
        )
        seed = self.sampling.seed
        return [
            replace(first, sampling=replace(self.sampling, seed=(seed + sample) % 2**64), sample=sample)
            for sample in range(self.samples)
        ]


def read_terms(
    message: pb.GenerateRequest,
    serving: Serving,
    tenant: str,
    config: TenantConfig,
    assignment: ArmAssignment | None,
    principal: str,
) -> Terms:
    """What the message asks for.

    Args:
        config: the tenant's, whose drafting the arm's replaces.
        principal: name of the caller.

    Raises:
        InvalidValueError: a field is wrong.
        UnsupportedByEngineError: the engine cannot do what a field asks for.
        PermissionDeniedError: the tenant's requests may not choose how they are drafted.
    """
    model, settings = serving.model, serving.settings
    given = {**config.sampling, **sampling_values(message.sampling)}
    samples = _samples(message.sampling, settings.max_running)
    sampling = _sampling(message, model, given)
    _check_abilities(sampling, message.output.draft_trees, model.abilities)
    _check_stop(message, model.vocab_size)
    choice = draft_choice(message.drafting)
    if not config.allow_draft_override:
        _refuse_override(message.drafting, principal, tenant)
    configured = config.drafting if assignment is None else assignment.arm.drafting
    server = Drafting(settings.strategy, (), settings.max_draft_nodes)
    return Terms(
        message=message,
        model=model,
        tenant=tenant,
        config=config,
        assignment=assignment,
        samples=samples,
        sampling=sampling,
        min_tokens=_min_tokens(message, samples, model.max_context),
        drafting=resolve(choice, configured, server, learns_prompts=config.learning.with_prompts),
    )


def draft_choice(options: pb.DraftOptions) -> DraftChoice:
    """A request's own drafting options."""
    return DraftChoice(
        strategy=options.strategy if options.HasField("strategy") else None,
        max_nodes=options.max_nodes if options.HasField("max_nodes") else None,
        enabled=options.enabled if options.HasField("enabled") else True,
    )


def _samples(options: pb.SamplingOptions, limit: int) -> int:
    """The number of samples. Raises InvalidValueError."""
    if not options.HasField("n"):
        return 1
    if not 1 <= options.n <= limit:
        raise InvalidValueError("sampling.n", options.n, f"it must lie in [1, {limit}]")
    return options.n


def _sampling(message: pb.GenerateRequest, model: ServedModel, given: dict[str, Any]) -> SamplingParams:
    """The options that are set, with the model's defaults for the others; a seed is drawn if one is needed and none is
    given.

    Raises:
        InvalidValueError: an option is outside its range.
    """
    require_at_most("sampling.logit_bias", len(message.sampling.logit_bias), MAX_LOGIT_BIASES)
    bias = sorted(message.sampling.logit_bias.items())
    for token, _ in bias:
        if not 0 <= token < model.vocab_size:
            problem = f"the key must lie in [0, {model.vocab_size - 1}], the model's vocabulary"
            raise InvalidInputError(f"sampling.logit_bias[{token}]", None, problem)
    logprobs = message.output.top_logprobs if message.output.HasField("top_logprobs") else None
    sampling = replace(model.defaults.sampling, **given, logit_bias=tuple(bias), logprobs=logprobs)
    if sampling.temperature and not message.sampling.HasField("seed"):
        return replace(sampling, seed=secrets.randbits(64))
    return sampling


def _check_abilities(sampling: SamplingParams, draft_trees: bool, abilities: Abilities) -> None:
    """Checks the sampling of a request, defaults included, and whether drafts can be shown.

    Raises:
        UnsupportedByEngineError: the engine cannot do it.
    """
    if sampling.min_p and sampling.temperature and not abilities.min_p:
        raise UnsupportedByEngineError("sampling.min_p", sampling.min_p, abilities.engine, "use top_p or top_k")
    if sampling.logit_bias and not abilities.logit_bias:
        raise UnsupportedByEngineError("sampling.logit_bias", None, abilities.engine, "it must be empty")
    if sampling.temperature > abilities.max_temperature:
        allowed = f"it must be at most {abilities.max_temperature:g}"
        raise UnsupportedByEngineError("sampling.temperature", sampling.temperature, abilities.engine, allowed)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if abs(value) > abilities.max_penalty:
            allowed = f"it must lie in [{-abilities.max_penalty:g}, {abilities.max_penalty:g}]"
            raise UnsupportedByEngineError(f"sampling.{name}", value, abilities.engine, allowed)
    if sampling.logprobs is not None and sampling.logprobs > abilities.max_logprobs:
        allowed = f"it must be at most {abilities.max_logprobs}"
        raise UnsupportedByEngineError("output.top_logprobs", sampling.logprobs, abilities.engine, allowed)
    if draft_trees and not abilities.draft_trees:
        raise UnsupportedByEngineError("output.draft_trees", None, abilities.engine, "it must be false")


def _check_stop(message: pb.GenerateRequest, vocab_size: int) -> None:
    """Raises InvalidInputError for what is wrong whatever the prompt."""
    options = message.stop
    require_at_most("stop.strings", len(options.strings), MAX_STOP_STRINGS)
    for index, text in enumerate(options.strings):
        require_length(f"stop.strings[{index}]", text, MAX_STOP_STRING_CHARACTERS)
    require_at_most("stop.token_ids", len(options.token_ids), MAX_STOP_TOKEN_IDS)
    require_in_vocabulary("stop.token_ids", np.array(options.token_ids, np.int32), vocab_size)
    if message.format.WhichOneof("format") is not None:
        for name in ("ignore_eos", "min_tokens"):
            if getattr(options, name):
                problem = "cannot be combined with format, which determines the end of the answer"
                raise InvalidInputError(f"stop.{name}", None, problem)


def _stop(message: pb.GenerateRequest, model: ServedModel, prompt: Prompt) -> StopParams:
    """When the answer ends; without max_tokens and a default of the model, at the end of the context.

    Raises:
        InvalidValueError: a value is wrong, or prompt and answer do not fit the context.
    """
    options, defaults = message.stop, model.defaults
    available = model.max_context - prompt.ids.size
    if available < 1:
        raise prompt_too_long(prompt.field, prompt.ids.size, model)
    usual = min(defaults.max_tokens or available, available)
    max_tokens = options.max_tokens if options.HasField("max_tokens") else usual
    if max_tokens > available:
        problem = (
            f"{max_tokens} is not allowed; it must be at most {available}: the prompt has {prompt.ids.size} tokens"
        )
        raise ContextLengthError("stop.max_tokens", problem, model.max_context)
    usual = 0 if message.format.WhichOneof("format") is not None else min(defaults.min_tokens, max_tokens)
    special = {} if message.output.include_special_tokens else model.tokenizer.token_bytes.special_ids
    # No text of the answer matches them. A tokenizer may have more than the model.
    ends = {special[text] for text in options.strings if special.get(text, model.vocab_size) < model.vocab_size}
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens if options.HasField("min_tokens") else usual,
        strings=tuple(options.strings),
        token_ids=frozenset(options.token_ids) | ends,
        ignore_eos=options.ignore_eos,
    )


def _min_tokens(message: pb.GenerateRequest, samples: int, context: int) -> int:
    """At most the context for prompt and answer, since more is invalid."""
    prompt = len(message.token_ids.ids) if message.HasField("token_ids") else 1
    answer = message.stop.max_tokens if message.stop.HasField("max_tokens") else 1
    return max(1, min(prompt, context)) + samples * max(1, min(answer, context))


def _refuse_override(options: pb.DraftOptions, principal: str, tenant: str) -> None:
    """Raises PermissionDeniedError for a request that chooses how it is drafted."""
    for name in ("strategy", "max_nodes", "enabled"):
        if options.HasField(name):
            raise PermissionDeniedError(f"drafting.{name}: requests of this tenant cannot choose it", principal, tenant)


def _require_known(prompt: Prompt, vocab_size: int) -> None:
    """Raises InvalidInputError for a text with a token that its tokenizer has and the model has not."""
    if (highest := int(prompt.ids.max())) >= vocab_size:
        problem = f"its tokenizer makes token {highest} of it; the model's vocabulary is [0, {vocab_size - 1}]"
        raise InvalidInputError(prompt.field, None, problem)
