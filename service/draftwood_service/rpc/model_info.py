"""What GetModelInfo answers."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.sampling.generation_defaults import GenerationDefaults
from draftwood_service.rpc.prompts import MAX_GRAMMAR_CHARACTERS, MAX_TEMPLATE_KWARGS_CHARACTERS, MAX_TOOLS
from draftwood_service.rpc.requests import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from draftwood_service.serving import Serving
from draftwood_service.tools import ToolFormat
from draftwood_strategies import strategy_names


def model_info(serving: Serving) -> pb.GetModelInfoResponse:
    """The model's properties and the limits of requests."""
    model, settings, tool_format = serving.model, serving.settings, serving.model.tool_format
    return pb.GetModelInfoResponse(
        model=model.name,
        architecture=model.architecture,
        parameters=model.parameters,
        dtype=model.dtype,
        device=model.device,
        vocab_size=model.vocab_size,
        max_context_tokens=model.max_context,
        max_running_requests=settings.max_running,
        max_waiting_requests=settings.max_waiting,
        max_draft_nodes=settings.max_draft_nodes,
        has_chat_template=model.tokenizer.has_chat_template,
        strategies=strategy_names(),
        default_strategy=settings.strategy,
        eos_token_ids=sorted(model.eos_token_ids),
        server_version=version("draftwood"),
        exact=model.exact,
        runner=model.runner_name,
        runner_reason=model.runner_reason,
        weights=model.weights,
        generation_defaults=_defaults(model.defaults),
        limits=pb.RequestLimits(
            message_bytes=settings.max_message_bytes,
            prompt_characters=serving.max_prompt_characters,
            chat_messages=settings.max_chat_messages,
            stop_strings=MAX_STOP_STRINGS,
            stop_string_characters=MAX_STOP_STRING_CHARACTERS,
            stop_token_ids=MAX_STOP_TOKEN_IDS,
            logit_biases=MAX_LOGIT_BIASES,
            format_characters=MAX_GRAMMAR_CHARACTERS,
            samples=settings.max_running,
            tools=MAX_TOOLS,
            template_kwargs_characters=MAX_TEMPLATE_KWARGS_CHARACTERS,
        ),
        memory_max_bytes=settings.memory_budget,
        tool_format=pb.ToolFormat(**asdict(tool_format)) if isinstance(tool_format, ToolFormat) else None,
        no_tools_reason="" if isinstance(tool_format, ToolFormat) else str(tool_format),
        abilities=pb.EngineAbilities(**asdict(model.abilities)),
        reasoning_format=pb.ReasoningFormat(**asdict(reasoning)) if (reasoning := model.reasoning_format) else None,
        template_kwargs=sorted(model.tokenizer.template_variables),
        draft_models=[pb.DraftModel(**drafter._asdict()) for drafter in model.draft_models],
    )


def _defaults(defaults: GenerationDefaults) -> pb.GenerationDefaults:
    sampling, constraints = defaults.sampling, defaults.constraints
    return pb.GenerationDefaults(
        sampling=pb.SamplingOptions(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
        ),
        stop=pb.StopOptions(max_tokens=defaults.max_tokens, min_tokens=defaults.min_tokens),
        constraints=pb.LogitConstraints(
            no_repeat_ngram_size=constraints.no_repeat_ngram_size,
            bad_words=[pb.TokenIds(ids=words) for words in constraints.bad_words],
            suppressed=constraints.suppressed,
            suppressed_first=constraints.suppressed_first,
            forced_last=constraints.forced_last,
        ),
    )
