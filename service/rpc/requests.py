"""From a request's message to the engine's Sequence: every field is checked here, and named when it is wrong.

Knows messages, the tokenizer and limits; nothing of streams, threads or statuses.
"""

from __future__ import annotations

import asyncio
import secrets
import unicodedata
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftwood.v1 import generation_pb2 as pb
from model_runner.errors import InvalidValueError
from model_runner.sequence import Format, GrammarKind, SamplingParams, Sequence, SequenceStats, StopParams
from service.serving import ServedModel, Serving, TextTokenizer
from strategies import names
from strategies.draft import Int32Array

DEFAULT_TENANT = "default"
MAX_NAME_BYTES = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_GRAMMAR_CHARACTERS = 64 * 1024
NO_DRAFTS = "none"

_SHORT_TEXT = 8 * 1024
"""Characters that are tokenized at once; longer texts go to a worker thread, so that other streams go on."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, and the request's field that holds it."""

    field: str
    ids: Int32Array


def read_samples(options: pb.SamplingOptions, most: int) -> int:
    """How many samples the request asks for.

    Args:
        most: as many as are written together.

    Raises:
        InvalidValueError: it is out of range, or greedy decoding would write the same answer several times.
    """
    if not options.HasField("n"):
        return 1
    if not 1 <= options.n <= most:
        raise InvalidValueError("sampling.n", options.n, f"it must lie in [1, {most}]")
    if options.n > 1 and not options.temperature:
        raise InvalidValueError("sampling.n", options.n, "samples differ only with a temperature above 0")
    return options.n


async def read_sequences(
    request: pb.GenerateRequest,
    serving: Serving,
    *,
    request_id: str,
    tenant: str,
    arrived_at: float,
    deadline: float,
) -> list[Sequence]:
    """The sequences that a request asks for, one for each sample.

    Args:
        arrived_at, deadline: when the request came, and when it is of no use any more, on the clock of
            `time.perf_counter`.

    Raises:
        InvalidValueError: a field's value is not allowed; names the field, the value and what is.
    """
    sampling = read_sampling(request, serving.model.vocab_size)
    strategy_name, max_nodes = _drafting(request.drafting, serving)
    prompt = await read_prompt(request, serving.model)
    stop = read_stop(request.stop, serving.model, prompt)
    if request.format.WhichOneof("format"):
        for name, value in (("ignore_eos", stop.ignore_eos), ("min_tokens", stop.min_tokens)):
            if value:
                raise InvalidValueError(f"stop.{name}", value, "an answer in a format ends where the format does")
    output_format = await read_format(request.format, serving.model)
    return [
        Sequence(
            request_id=request_id,
            prompt=prompt.ids,
            stop=stop,
            sampling=replace(sampling, seed=(sampling.seed + sample) % 2**64),
            strategy_name=strategy_name,
            max_draft_nodes=max_nodes,
            format=output_format,
            include_special_tokens=request.output.include_special_tokens,
            tenant=tenant,
            priority=request.priority,
            deadline=deadline,
            stats=SequenceStats(arrived_at=arrived_at),
        )
        for sample in range(max(request.sampling.n, 1))
    ]


def checked_name(field: str, name: str) -> str:
    """`name`, fit for logs, traces and keys.

    Raises:
        InvalidValueError: it has more than `MAX_NAME_BYTES` bytes of UTF-8, or control characters.
    """
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidValueError(field, name, f"it must have at most {MAX_NAME_BYTES} bytes of UTF-8")
    if any(unicodedata.category(character) == "Cc" for character in name):
        raise InvalidValueError(field, name, "it must not contain control characters")
    return name


def read_sampling(request: pb.GenerateRequest, vocab_size: int) -> SamplingParams:
    """The options that are set, over the defaults; a seed is drawn where one is needed and none is given.

    Raises:
        InvalidValueError: an option is outside its range.
    """
    # A 32-bit float is read as the shortest decimal that means it: 0.7 and not 0.699999988.
    values: dict[str, Any] = {
        field.name: float(str(np.float32(value))) if isinstance(value, float) else value
        for field, value in request.sampling.ListFields()
        if field.name not in ("logit_bias", "n")
    }
    bias = sorted(request.sampling.logit_bias.items())
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidValueError("sampling.logit_bias", len(bias), f"at most {MAX_LOGIT_BIASES} may be given")
    require_in_vocabulary("sampling.logit_bias", np.array([token for token, _ in bias], np.int32), vocab_size)
    if values.get("temperature") and not request.sampling.HasField("seed"):
        values["seed"] = secrets.randbits(64)
    logprobs = request.output.top_logprobs if request.output.HasField("top_logprobs") else None
    return SamplingParams(**values, logit_bias=tuple(bias), logprobs=logprobs)


async def read_format(options: pb.OutputFormat, model: ServedModel) -> Format | None:
    """What the answer must follow; tried in a worker thread, for a large grammar takes its time.

    Raises:
        InvalidValueError: it is not a valid grammar.
    """
    kind = options.WhichOneof("format")
    if kind is None:
        return None
    text: str = getattr(options, kind)
    if not 1 <= len(text) <= MAX_GRAMMAR_CHARACTERS:
        raise InvalidValueError(f"format.{kind}", text, f"it must have 1 to {MAX_GRAMMAR_CHARACTERS} characters")
    checked = Format(GrammarKind(kind), text)
    await asyncio.to_thread(model.grammars.compile, checked.kind, checked.text)
    return checked


async def read_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> Prompt:
    """The prompt in whichever form it came.

    Raises:
        InvalidValueError: there is none, it is empty, or a token id or a message is not allowed.
    """
    if request.HasField("text"):
        if not request.text:
            raise InvalidValueError("text", "", "it must not be empty")
        return _not_empty(Prompt("text", await encode(model.tokenizer, request.text)))
    if request.HasField("chat"):
        return _not_empty(Prompt("chat.messages", await _encode_chat(model.tokenizer, request.chat)))
    if isinstance(request, pb.GenerateRequest) and request.HasField("token_ids"):
        given = request.token_ids.ids
        if len(given) >= model.max_context:
            raise _too_long("token_ids.ids", len(given), model)
        ids = np.array(given, np.int32)
        require_in_vocabulary("token_ids.ids", ids, model.vocab_size)
        return _not_empty(Prompt("token_ids.ids", ids))
    if isinstance(request, pb.GenerateRequest):
        raise InvalidValueError("prompt", None, "one of text, token_ids and chat must be set")
    raise InvalidValueError("input", None, "one of text and chat must be set")


def read_stop(options: pb.StopOptions, model: ServedModel, prompt: Prompt) -> StopParams:
    """When the answer ends; without max_tokens, where the context does.

    Raises:
        InvalidValueError: a value is not allowed, or prompt and answer do not fit the context.
    """
    room = model.max_context - prompt.ids.size
    if room < 1:
        raise _too_long(prompt.field, prompt.ids.size, model)
    max_tokens = options.max_tokens if options.HasField("max_tokens") else room
    if max_tokens > room:
        allowed = f"the prompt has {prompt.ids.size} of the context's {model.max_context} tokens; room is for {room}"
        raise InvalidValueError("stop.max_tokens", max_tokens, allowed)
    if len(options.strings) > MAX_STOP_STRINGS:
        raise InvalidValueError("stop.strings", len(options.strings), f"there must be at most {MAX_STOP_STRINGS}")
    for index, text in enumerate(options.strings):
        if not 1 <= len(text) <= MAX_STOP_STRING_CHARACTERS:
            allowed = f"it must have 1 to {MAX_STOP_STRING_CHARACTERS} characters"
            raise InvalidValueError(f"stop.strings[{index}]", text, allowed)
    if len(options.token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidValueError("stop.token_ids", len(options.token_ids), f"at most {MAX_STOP_TOKEN_IDS} may be given")
    require_in_vocabulary("stop.token_ids", np.array(options.token_ids, np.int32), model.vocab_size)
    return StopParams(
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        strings=tuple(options.strings),
        token_ids=frozenset(options.token_ids),
        ignore_eos=options.ignore_eos,
    )


def require_in_vocabulary(field: str, ids: Int32Array, vocab_size: int) -> None:
    """Raises InvalidValueError for the first token id, int32[n], that the model does not know."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        index = int(outside[0])
        allowed = f"it must lie in [0, {vocab_size - 1}], the model's vocabulary"
        raise InvalidValueError(f"{field}[{index}]", int(ids[index]), allowed)


async def encode(tokenizer: TextTokenizer, text: str) -> Int32Array:
    """int32[n]; a long text is tokenized in a worker thread."""
    return tokenizer.encode(text) if len(text) <= _SHORT_TEXT else await asyncio.to_thread(tokenizer.encode, text)


async def _encode_chat(tokenizer: TextTokenizer, chat: pb.Chat) -> Int32Array:
    if not chat.messages:
        raise InvalidValueError("chat.messages", [], "it must not be empty")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidValueError(f"chat.messages[{index}].role", "", "it must not be empty")
    if not tokenizer.has_chat_template:
        raise InvalidValueError("chat", f"{len(chat.messages)} messages", "the model has no chat template; send text")
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    if sum(len(message.content) for message in chat.messages) <= _SHORT_TEXT:
        return tokenizer.encode_chat(messages)
    return await asyncio.to_thread(tokenizer.encode_chat, messages)


def _drafting(options: pb.DraftOptions, serving: Serving) -> tuple[str, int]:
    """The strategy's name and the cap on draft nodes a step."""
    name = options.strategy if options.HasField("strategy") else serving.default_strategy
    if name not in names():
        raise InvalidValueError("drafting.strategy", name, f"it must be one of {', '.join(names())}")
    max_nodes = options.max_nodes if options.HasField("max_nodes") else serving.max_draft_nodes
    if max_nodes < 0:
        raise InvalidValueError("drafting.max_nodes", max_nodes, "it must be at least 0")
    if name == NO_DRAFTS or (options.HasField("enabled") and not options.enabled):
        return NO_DRAFTS, 0
    return name, min(max_nodes, serving.max_draft_nodes)


def _not_empty(prompt: Prompt) -> Prompt:
    if prompt.ids.size == 0:
        raise InvalidValueError(prompt.field, "no tokens", "it must not be empty")
    return prompt


def _too_long(field: str, tokens: int, model: ServedModel) -> InvalidValueError:
    allowed = f"a prompt may have at most {model.max_context - 1}, one less than the context"
    return InvalidValueError(field, f"{tokens} tokens", allowed)
