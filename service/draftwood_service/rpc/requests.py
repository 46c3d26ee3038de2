"""From a request's message to the `Request`s of its samples. Errors name the field that is wrong.

A rule that the engine's own types check (`SamplingParams`, `StopParams`, `Request`) is not repeated here, except for
stop strings, so that the error names the one that is wrong.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.request import (
    Format,
    GrammarKind,
    MemoryOptions,
    Request,
    SamplingParams,
    StopParams,
)
from draftwood_service.auth import PermissionDeniedError
from draftwood_service.errors import ContextLengthError
from draftwood_service.rpc.calls import Call
from draftwood_service.rpc.parsing.abilities import check_format, check_sampling, check_trees
from draftwood_service.rpc.parsing.bounds import require_at_most, require_length
from draftwood_service.rpc.parsing.chat import read_chat
from draftwood_service.rpc.parsing.text_executor import TextExecutor
from draftwood_service.serving import ServedModel, Serving
from draftwood_strategies import strategy_names
from draftwood_strategies.draft import Int32Array
from draftwood_tenants.config import LearningScope, TenantConfig
from draftwood_tenants.drafting import DraftChoice, Drafting, drafting_of
from draftwood_tenants.experiments.arm_assignment import ArmAssignment
from draftwood_tenants.reading import sampling_values

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024

_SHORT_TEXT = 8 * 1024
"""Characters that are tokenized on the event loop; longer texts go to a worker thread, and other streams continue."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, int32[n], and the request's field that it came from."""

    field: str
    ids: Int32Array


def read_samples(options: pb.SamplingOptions, limit: int) -> int:
    """The number of samples, at most `limit`. Raises InvalidValueError if it is out of range."""
    if not options.HasField("n"):
        return 1
    if not 1 <= options.n <= limit:
        raise InvalidValueError("sampling.n", options.n, f"it must lie in [1, {limit}]")
    return options.n


async def read_requests(
    request: pb.GenerateRequest,
    serving: Serving,
    text_executor: TextExecutor,
    config: TenantConfig,
    assignment: ArmAssignment | None,
    call: Call,
    *,
    tenant: str,
    deadline: float,
) -> list[Request]:
    """What the message asks for, one for each sample.

    Args:
        text_executor: reads long texts.
        config: the tenant's.
        assignment: the arm, whose drafting replaces the tenant's.
        tenant: of the call (see `Principal.tenant_for`).
        deadline: of the request, on the clock of `time.perf_counter`.

    Raises:
        InvalidValueError: a field is wrong.
        UnsupportedByEngineError: the engine cannot do what a field asks for.
        PermissionDeniedError: the tenant's requests may not choose how they are drafted.
        TooMuchTextError: too many long texts wait already.
    """
    model, output = serving.model, request.output
    sampling = read_sampling(request, model, config)
    check_sampling(sampling, model.abilities)
    check_trees(output.draft_trees, model.abilities)
    if not config.allow_draft_override:
        _refuse_override(request.drafting, call.principal.name, tenant)
    if assignment is not None:
        config = replace(config, drafting=assignment.arm.drafting)
    strategy_name, options, max_nodes = _drafting(request.drafting, serving, config)
    prompt = await read_prompt(request, serving, text_executor, tenant)
    _require_known(prompt, model.vocab_size)
    stop = read_stop(request, model, prompt)
    learning, forked = config.learning, assignment is not None and assignment.arm.forked
    may_learn = request.drafting.learn or not request.drafting.HasField("learn")
    first = Request(
        request_id=call.request_id,
        prompt=prompt.ids,
        stop=stop,
        sampling=sampling,
        strategy_name=strategy_name,
        strategy_options=options,
        max_draft_nodes=max_nodes,
        learns=may_learn and learning.scope is not LearningScope.NOTHING,
        format=await read_format(request.format, model, text_executor, tenant),
        include_special_tokens=output.include_special_tokens,
        tenant=tenant,
        priority=request.priority,
        deadline=deadline,
        arrived_at=call.arrived_at,
        arm="" if assignment is None else assignment.label,
        memory=MemoryOptions(with_prompts=learning.with_prompts, **asdict(replace(learning.overrides, forked=forked))),
        draft_trees=output.draft_trees,
    )
    return [
        replace(first, sampling=replace(sampling, seed=(sampling.seed + sample) % 2**64), sample=sample)
        for sample in range(max(request.sampling.n, 1))
    ]


def read_sampling(request: pb.GenerateRequest, model: ServedModel, config: TenantConfig) -> SamplingParams:
    """The options that are set, with the tenant's and then the model's defaults for the others; a seed is drawn if one
    is needed and none is given.

    Raises:
        InvalidValueError: an option is outside its range.
    """
    values = {**config.sampling, **sampling_values(request.sampling)}
    bias = sorted(request.sampling.logit_bias.items())
    require_at_most("sampling.logit_bias", len(bias), MAX_LOGIT_BIASES)
    for token, _ in bias:
        if not 0 <= token < model.vocab_size:
            problem = f"the key must lie in [0, {model.vocab_size - 1}], the model's vocabulary"
            raise InvalidInputError(f"sampling.logit_bias[{token}]", None, problem)
    logprobs = request.output.top_logprobs if request.output.HasField("top_logprobs") else None
    sampling = replace(model.defaults.sampling, **values, logit_bias=tuple(bias), logprobs=logprobs)
    if sampling.temperature and not request.sampling.HasField("seed"):
        return replace(sampling, seed=secrets.randbits(64))
    return sampling


async def read_format(
    options: pb.OutputFormat, model: ServedModel, text_executor: TextExecutor, tenant: str
) -> Format | None:
    """The format that the answer must follow; tried in a worker thread, since a large grammar takes long.

    Raises:
        InvalidValueError: it cannot be compiled, or takes too much time or memory.
        TooMuchTextError: too many formats wait already.
    """
    kind = options.WhichOneof("format")
    if kind is None:
        if options.ByteSize():
            raise InvalidInputError(
                "format", None, "is of a kind that this server does not know; it must not be ignored"
            )
        return None
    text: str = getattr(options, kind)
    require_length(f"format.{kind}", text, MAX_GRAMMAR_CHARACTERS)
    checked = Format(GrammarKind(kind), text)
    check_format(checked.kind, model.abilities)
    await text_executor.run(tenant, model.grammars.check, checked.kind, checked.text)
    return checked


async def read_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest, serving: Serving, text_executor: TextExecutor, tenant: str
) -> Prompt:
    """The prompt: text, chat messages or token ids. Sizes are checked before anything else is done with them.

    Raises:
        InvalidValueError: it is missing, empty or too long, or a token id or a message is wrong.
        TooMuchTextError: too many long texts wait already.
    """
    model = serving.model
    if request.HasField("text"):
        if not request.text:
            raise InvalidInputError("text", None, "must not be empty")
        if len(request.text) > (most := serving.max_prompt_characters):
            problem = f"must have at most {most} characters; it has {len(request.text)}"
            raise ContextLengthError("text", problem, model.max_context)
        encode = model.tokenizer.encode
        return _not_empty(Prompt("text", await _read(text_executor, tenant, len(request.text), encode, request.text)))
    if request.HasField("chat"):
        messages, tools, characters = read_chat(request.chat, serving)
        encode_chat = partial(model.tokenizer.encode_chat, tools=tools) if tools else model.tokenizer.encode_chat
        return _not_empty(
            Prompt("chat.messages", await _read(text_executor, tenant, characters, encode_chat, messages))
        )
    if isinstance(request, pb.GenerateRequest) and request.HasField("token_ids"):
        given = request.token_ids.ids
        if len(given) >= model.max_context:
            raise _too_long("token_ids.ids", len(given), model)
        ids = np.array(given, np.int32)
        require_in_vocabulary("token_ids.ids", ids, model.vocab_size)
        return _not_empty(Prompt("token_ids.ids", ids))
    if isinstance(request, pb.GenerateRequest):
        raise InvalidInputError("prompt", None, "one of text, token_ids and chat must be set")
    raise InvalidInputError("input", None, "one of text and chat must be set")


def read_stop(request: pb.GenerateRequest, model: ServedModel, prompt: Prompt) -> StopParams:
    """When the answer ends; without max_tokens and a default of the model, at the end of the context.

    Raises:
        InvalidValueError: a value is wrong, or prompt and answer do not fit the context.
    """
    options, has_format = request.stop, request.format.WhichOneof("format") is not None
    available = model.max_context - prompt.ids.size
    if available < 1:
        raise _too_long(prompt.field, prompt.ids.size, model)
    defaults = model.defaults
    usual = min(defaults.max_tokens or available, available)
    max_tokens = options.max_tokens if options.HasField("max_tokens") else usual
    if max_tokens > available:
        problem = (
            f"{max_tokens} is not allowed; it must be at most {available}: the prompt has {prompt.ids.size} tokens"
        )
        raise ContextLengthError("stop.max_tokens", problem, model.max_context)
    require_at_most("stop.strings", len(options.strings), MAX_STOP_STRINGS)
    for index, text in enumerate(options.strings):
        require_length(f"stop.strings[{index}]", text, MAX_STOP_STRING_CHARACTERS)
    require_at_most("stop.token_ids", len(options.token_ids), MAX_STOP_TOKEN_IDS)
    require_in_vocabulary("stop.token_ids", np.array(options.token_ids, np.int32), model.vocab_size)
    usual = 0 if has_format else min(defaults.min_tokens, max_tokens)
    special = {} if request.output.include_special_tokens else model.tokenizer.token_bytes.special_ids
    # No text of the answer matches them. A tokenizer may have more than the model.
    ends = {special[text] for text in options.strings if special.get(text, model.vocab_size) < model.vocab_size}
    stop = StopParams(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens if options.HasField("min_tokens") else usual,
        strings=tuple(options.strings),
        token_ids=frozenset(options.token_ids) | ends,
        ignore_eos=options.ignore_eos,
    )
    for name in ("ignore_eos", "min_tokens"):
        if has_format and getattr(options, name):
            problem = "cannot be combined with format, which determines the end of the answer"
            raise InvalidInputError(f"stop.{name}", None, problem)
    return stop


def require_in_vocabulary(field: str, ids: Int32Array, vocab_size: int) -> None:
    """Raises InvalidValueError for the first token id, int32[n], outside of the model's vocabulary."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        index = int(outside[0])
        allowed = f"it must lie in [0, {vocab_size - 1}], the model's vocabulary"
        raise InvalidValueError(f"{field}[{index}]", int(ids[index]), allowed)


def _require_known(prompt: Prompt, vocab_size: int) -> None:
    """Raises InvalidInputError for a text with a token that its tokenizer has and the model has not."""
    if (greatest := int(prompt.ids.max())) >= vocab_size:
        problem = f"its tokenizer makes token {greatest} of it; the model's vocabulary is [0, {vocab_size - 1}]"
        raise InvalidInputError(prompt.field, None, problem)


async def _read(
    text_executor: TextExecutor, tenant: str, characters: int, encode: Callable[[Any], Int32Array], text: Any
) -> Int32Array:
    """int32[n]: what `encode` makes of a text, or of messages; of a long one in a thread."""
    return encode(text) if characters <= _SHORT_TEXT else await text_executor.run(tenant, encode, text)


def _refuse_override(options: pb.DraftOptions, principal: str, tenant: str) -> None:
    """Raises PermissionDeniedError for a request that chooses how it is drafted."""
    for name in ("strategy", "max_nodes", "enabled"):
        if options.HasField(name):
            raise PermissionDeniedError(f"drafting.{name}: requests of this tenant cannot choose it", principal, tenant)


def choice_of(options: pb.DraftOptions) -> DraftChoice:
    """A request's own drafting options."""
    strategy = options.strategy if options.HasField("strategy") else None
    max_nodes = options.max_nodes if options.HasField("max_nodes") else None
    return DraftChoice(strategy, max_nodes, options.enabled if options.HasField("enabled") else True)


def _drafting(options: pb.DraftOptions, serving: Serving, config: TenantConfig) -> Drafting:
    """Raises InvalidValueError."""
    choice = choice_of(options)
    if choice.strategy is not None and choice.strategy not in strategy_names():
        raise InvalidValueError(
            "drafting.strategy", choice.strategy, f"it must be one of {', '.join(strategy_names())}"
        )
    if choice.max_nodes is not None and choice.max_nodes < 0:
        raise InvalidValueError("drafting.max_nodes", choice.max_nodes, "it must be at least 0")
    return drafting_of(choice, config, serving.settings.strategy, serving.settings.max_draft_nodes)


def _not_empty(prompt: Prompt) -> Prompt:
    if prompt.ids.size == 0:
        raise InvalidInputError(prompt.field, None, "must not be empty")
    return prompt


def _too_long(field: str, tokens: int, model: ServedModel) -> ContextLengthError:
    problem = f"the prompt has {tokens} tokens; at most {model.max_context - 1} fit"
    return ContextLengthError(field, problem, model.max_context)
