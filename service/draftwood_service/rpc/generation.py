"""GenerationService: Generate, GenerateStream, Tokenize, Detokenize, GetModelInfo.

Works with messages, streams and time limits. Threads are in `engine`, statuses in `errors`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.output import Finish
from draftwood_model_runner.request import Request
from draftwood_service.auth import Principal, Role
from draftwood_service.engine.bridge import EngineBridge
from draftwood_service.engine.stream import Sample, Stream
from draftwood_service.errors import DeadlineExceededError, ModelNotServedError
from draftwood_service.experiments.live import LiveExperiments
from draftwood_service.quotas import Limiter, RateLimits
from draftwood_service.quotas.request_quota import RequestQuota, TextCallQuota
from draftwood_service.rpc.answers import (
    MAX_ANSWER_BYTES,
    AnswerMessages,
    Writer,
    gather,
    pad,
    padding_of_whole,
    relay,
    require_size_of_whole,
)
from draftwood_service.rpc.calls import Call, Run
from draftwood_service.rpc.model_info import model_info
from draftwood_service.rpc.parts import AnswerReader, bytes_of_beginnings
from draftwood_service.rpc.prompts import (
    TextExecutor,
    read_format,
    read_prompt,
    read_variables,
    require_at_most,
    require_in_vocabulary,
)
from draftwood_service.rpc.request_log import RequestLog
from draftwood_service.rpc.requests import Terms, draft_choice, read_terms
from draftwood_service.serving import Serving
from draftwood_service.tools import ReasoningFormat, ToolFormat, reasoning_format_of
from draftwood_strategies.drafting import NO_CHOICE
from draftwood_tenants.config import DeltaShaping, TenantConfig
from draftwood_tenants.experiments.arms import ArmAssignment
from draftwood_tenants.reading import check_identifier

_CLIENT_FIRST = 0.25
"""Seconds after the client's deadline until the server ends a call: gRPC ends it first, so that two statuses do not
race."""
_AT_DEADLINE = 0.05
"""A cancellation at most so many seconds before the deadline, by the server's clock, is logged as the deadline."""
_FEW_TOKENS = 2048
"""Tokens that are converted to text on the event loop; more go to a worker thread."""
_FEW_DETAILS = 512
"""Tokens with details that are made a message on the event loop; more go to a worker thread."""
_LAST_TOKENS = 32
"""Of a prompt, in which the marker of reasoning would be."""


@dataclass(frozen=True, slots=True)
class Answering:
    """A request that the engine has.

    Attributes:
        shaping: of its messages.
        messages: what makes them.
    """

    stream: Stream
    quota: RequestQuota
    record: RequestLog
    shaping: DeltaShaping
    messages: AnswerMessages

    @property
    def request(self) -> Request:
        """Of the first sample."""
        return self.record.samples[0].request

    async def release(self) -> None:
        """Gives back what the answer did not use of the tenant's quota."""
        self.quota.release(used_tokens(self.record.samples))
        await self.quota.released()

    def ended(self, finishes: SequenceOf[Finish]) -> None:
        """Notes how the samples ended."""
        self.record.finish_reasons = [finish.reason.value for finish in finishes]
        self.record.outcome = self.record.finish_reasons[0]


class GenerationServicer:
    """The methods of GenerationService.

    Args:
        config_of: a tenant's configuration.
        experiments: that requests take part in.
    """

    def __init__(
        self,
        serving: Serving,
        bridge: EngineBridge,
        limiter: Limiter,
        config_of: Callable[[str], TenantConfig],
        experiments: LiveExperiments,
    ) -> None:
        settings = serving.settings
        self._serving = serving
        self._bridge = bridge
        self._config_of = config_of
        self._experiments = experiments
        self._settings = settings
        self._limiter = limiter
        self._text_quota = TextCallQuota()
        self._default_limits = settings.rate_limits
        self._shaping = settings.delta_shaping
        self._token_bytes = serving.model.tokenizer.token_bytes
        self._text_executor = TextExecutor()
        self._info = model_info(serving)

    @property
    def methods(self) -> dict[str, Run]:
        """What answers each method of the service."""
        return {
            "Generate": self.generate,
            "GenerateStream": self.generate_stream,
            "Tokenize": self.tokenize,
            "Detokenize": self.detokenize,
            "GetModelInfo": self.get_model_info,
        }

    def close(self) -> None:
        """Ends its threads."""
        self._text_executor.close()

    async def generate(self, request: pb.GenerateRequest, call: Call) -> pb.GenerateResponse:
        """The whole answer, or the error that ends the call with one status."""
        async with self.submitted(request, call, whole=True) as answering:
            outputs = await gather(answering.stream, answering.shaping)
            await answering.release()
            started = self._started(answering.request, answering.record.assignment)
            make, messages = answering.messages.whole, answering.messages
            few = not messages.with_details or sum(len(output.token_ids) for output in outputs) <= _FEW_DETAILS
            response = make(started, outputs) if few else await asyncio.to_thread(make, started, outputs)
            requests = [sample.request for sample in answering.record.samples]
            if padding := padding_of_whole(answering.shaping, requests, response.ByteSize()):
                pad(response, padding)
            answering.ended([output.finish for output in outputs if output.finish is not None])
            return response

    async def generate_stream(self, request: pb.GenerateRequest, call: Call) -> None:
        """Streams one Started, Deltas and one Finished, or raises the error that ends the call with one status."""
        async with self.submitted(request, call) as answering:
            shaping = answering.shaping
            async with Writer(call.context, self._settings.stall_timeout, shaping.padding) as writer:
                started = self._started(answering.request, answering.record.assignment)
                await writer.write(pb.GenerateStreamResponse(started=started))
                finishes = await relay(answering.stream, writer, answering.messages, shaping)
                await answering.release()  # a client may send its next request once it has read the end
                await writer.write(answering.messages.finished(finishes))
            answering.ended(finishes)

    @asynccontextmanager
    async def submitted(
        self, request: pb.GenerateRequest, call: Call, whole: bool = False, padded: bool = True
    ) -> AsyncIterator[Answering]:
        """Admits a request, and submits it to the engine. At the end its slots are free, what it did not use of its
        quota is given back, and it is logged.

        Args:
            whole: the answer is one message.
            padded: its messages can be padded.
        """
        self._require_served(request.model)
        tenant = call.principal.tenant_for(request.tenant)
        operation = "chat" if request.HasField("chat") else "text_completion"
        with RequestLog(call, tenant, operation, self._experiments.counting).until_end() as record:
            assignment = record.assignment = self._assign(request, call.request_id, tenant)
            config = self._config_of(tenant)
            shaping = config.streaming.shaping(self._shaping)
            if shaping.padding and not padded:
                problem = "is not served where messages are padded, since those of this service cannot be padded"
                raise InvalidInputError("request", None, problem)
            if request.output.draft_trees:
                _allow_trees(call.principal, shaping)
            terms = read_terms(request, self._serving, tenant, config, assignment, call.principal.name)
            stream = self._bridge.admit(terms.samples, tenant, call.request_id)
            quota = RequestQuota(self._limiter, tenant, self._limits_of(config))
            seconds = self._seconds(call)
            timer = asyncio.get_running_loop().call_later(seconds, stream.fail, DeadlineExceededError(seconds))
            try:
                await quota.enter(terms.min_tokens)
                requests = await self._read(terms, call, time.perf_counter() + seconds)
                messages = self._messages(terms, requests)
                if whole:
                    limits = messages.with_details, bool(request.output.draft_trees), self._settings.max_draft_nodes
                    require_size_of_whole(requests, *limits)
                record.samples = [*messages.samples]
                await quota.reserve_tokens(max_tokens(requests))
                stream.submit(*record.samples)
                quota.queued()
                shaping = shaping.holding(bytes_of_beginnings(self._called(request)))
                yield Answering(stream, quota, record, shaping, messages)
            except asyncio.CancelledError:
                left = remaining(call)
                if left is not None and left < _AT_DEADLINE:
                    record.outcome = "deadline_exceeded"
                raise
            finally:
                quota.release(used_tokens(record.samples))
                timer.cancel()
                stream.close()

    def refuse(self, error: Exception, call: Call, tenant: str) -> NoReturn:
        """Raises the error of a request that another service cannot read, after it was logged as any other.

        Args:
            tenant: that the request names; "" for none.
        """
        named = call.principal.tenant_for(tenant)
        with RequestLog(call, named, "text_completion", self._experiments.counting).until_end():
            raise error

    async def _read(self, terms: Terms, call: Call, deadline: float) -> list[Request]:
        """Does the work that reading takes: makes tokens of the prompt, and tries the format."""
        prompt = await read_prompt(terms.message, self._serving, self._text_executor, terms.tenant)
        answer_format = await read_format(terms.message.format, terms.model, self._text_executor, terms.tenant)
        return terms.requests(prompt, answer_format, call, deadline)

    def _called(self, message: pb.GenerateRequest) -> list[str]:
        """Names of the tools whose calls are read in the answer."""
        return [] if message.output.raw_text else [tool.name for tool in message.chat.tools]

    def _messages(self, terms: Terms, requests: SequenceOf[Request]) -> AnswerMessages:
        """What makes the messages of the answer, with a reader of each sample."""
        message, model, first = terms.message, self._serving.model, requests[0]
        names, is_read = self._called(message), message.HasField("chat") and not message.output.raw_text
        tools = model.tool_format if names and isinstance(model.tool_format, ToolFormat) else None
        reasoning, opened = (self._reasoning_format(message.chat) if is_read else None), False
        # An answer in a format is not reasoning from its first token.
        if reasoning is not None and first.format is None:
            last = model.tokenizer.decode(first.prompt[-_LAST_TOKENS:], include_special_tokens=True)
            opened = last.rstrip().endswith(reasoning.begin)
        return AnswerMessages(
            samples=[Sample(request) for request in requests],
            readers=[AnswerReader(reasoning, opened, tools, names) for _ in requests],
            with_details=message.output.token_details or terms.sampling.logprobs is not None,
            token_bytes=self._token_bytes,
        )

    def _reasoning_format(self, chat: pb.Chat) -> ReasoningFormat | None:
        """How the model marks its reasoning, which variables of its template may switch on or off."""
        model = self._serving.model
        if not chat.template_kwargs:
            return model.reasoning_format
        variables = read_variables(chat, model.tokenizer.template_variables)
        return reasoning_format_of(model.tokenizer, variables) or model.reasoning_format

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        self._require_served(request.model)
        tenant = call.principal.tenant_for("")
        limits = self._limits_of(self._config_of(tenant))
        self._text_quota.admit(tenant, limits)
        prompt = await read_prompt(request, self._serving, self._text_executor, tenant)
        self._text_quota.count(tenant, limits, prompt.ids.size)
        ids = prompt.ids.tolist()

        def response() -> pb.TokenizeResponse:
            return pb.TokenizeResponse(token_ids=ids, tokens=map(self._token_bytes.text, ids))

        answer = response() if len(ids) <= _FEW_TOKENS else await self._text_executor.run(tenant, response)
        if (size := answer.ByteSize()) > MAX_ANSWER_BYTES:
            problem = f"its {len(ids)} tokens make an answer of {size} bytes; at most {MAX_ANSWER_BYTES} are sent"
            raise InvalidInputError(prompt.field, None, problem)
        return answer

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        self._require_served(request.model)
        model, tenant = self._serving.model, call.principal.tenant_for("")
        limit = self._serving.max_prompt_characters  # as many tokens as Tokenize returns
        require_at_most("token_ids", len(request.token_ids), limit)
        if len(request.token_ids) > 1:  # for one alone there is next to nothing to do
            limits = self._limits_of(self._config_of(tenant))
            self._text_quota.admit(tenant, limits)
            self._text_quota.count(tenant, limits, len(request.token_ids))
        ids = np.array(request.token_ids, np.int32)
        require_in_vocabulary("token_ids", ids, model.vocab_size)
        arguments, decode = (ids, request.include_special_tokens), model.tokenizer.decode
        text = (
            decode(*arguments) if ids.size <= _FEW_TOKENS else await self._text_executor.run(tenant, decode, *arguments)
        )
        return pb.DetokenizeResponse(text=text)

    async def get_model_info(self, request: pb.GetModelInfoRequest, call: Call) -> pb.GetModelInfoResponse:
        return self._info

    def _assign(self, request: pb.GenerateRequest, request_id: str, tenant: str) -> ArmAssignment | None:
        """The request's arm; None if it takes part in no experiment. Raises InvalidInputError."""
        session, overridden = check_identifier("session", request.session), draft_choice(request.drafting) != NO_CHOICE
        return self._experiments.assigner.assign(tenant, request_id=request_id, session=session, overridden=overridden)

    def _started(self, request: Request, assignment: ArmAssignment | None) -> pb.Started:
        return pb.Started(
            request_id=request.request_id,
            model=self._serving.model.name,
            tenant=request.tenant,
            strategy=request.drafting.strategy,
            prompt_tokens=request.prompt.size,
            max_tokens=request.stop.max_tokens,
            experiment=assignment.experiment.config.name if assignment else "",
            arm=assignment.arm.id if assignment else "",
        )

    def _require_served(self, model: str) -> None:
        """Raises ModelNotServedError if a request names another model than the served one; "" names none."""
        served = self._serving.model.name
        if model not in ("", served):
            raise ModelNotServedError(model, served)

    def _limits_of(self, config: TenantConfig) -> RateLimits:
        return config.quotas.with_defaults(self._default_limits)

    def _seconds(self, call: Call) -> float:
        """Seconds until the server ends the call; gRPC itself ends it at the client's deadline."""
        left = remaining(call)
        return min(self._settings.default_timeout if left is None else left + _CLIENT_FIRST, self._settings.max_timeout)


def _allow_trees(caller: Principal, shaping: DeltaShaping) -> None:
    """Raises PermissionDeniedError or InvalidInputError if a caller gets no draft trees."""
    caller.require(Role.TENANT_ADMIN, "output.draft_trees")
    if shaping.cadence or shaping.padding:
        problem = "is not served where deltas are padded or sent at a fixed cadence: their sizes would show the drafts"
        raise InvalidInputError("output.draft_trees", None, problem)


def max_tokens(requests: SequenceOf[Request]) -> int:
    """Upper bound of the tokens of a request's samples; the prompt counts once."""
    return requests[0].prompt.size + sum(request.stop.max_tokens for request in requests)


def used_tokens(samples: SequenceOf[Sample]) -> int:
    """Tokens that the samples have used so far, counted as in `max_tokens`; 0 if the request was not read."""
    if not samples:
        return 0
    return samples[0].request.prompt.size + sum(sample.completion_tokens for sample in samples)


def remaining(call: Call) -> float | None:
    """Seconds until the client's deadline; None if it set none."""
    seconds: float | None = call.context.time_remaining()
    return seconds
