"""`vllm.grpc.engine.VllmEngine`: the contract by which the Shepherd gateway (`smg`) and pickers of the Gateway API know
an engine, as a second service on the same port.

A request becomes one of GenerationService and goes its way: keys, tenants, quotas, drafts, learning, log, metrics and
the stream are the same. What differs is in this file: names of fields, answers of token ids without text, and Abort.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from draftwood.v1 import generation_pb2 as native
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.output import Finish, FinishReason, TokenLogprobs
from draftwood_service.auth import Role
from draftwood_service.authorization import TENANT
from draftwood_service.engine.bridge import EngineBridge
from draftwood_service.engine.stream import Output, Sample
from draftwood_service.errors import AbortedError, NotServedError
from draftwood_service.rpc.answers import AnswerMessages, Writer, gather, relay
from draftwood_service.rpc.calls import Call, Run
from draftwood_service.rpc.generation import Answering, GenerationServicer
from draftwood_service.serving import Serving

_INT32 = 2**31 - 1
_CHUNK_BYTES = 64 * 1024
"""Of the tokenizer's archive in one message, as the contract's own servers send it."""
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}
_FIELDS = {
    "token_ids.ids": "tokenized.input_ids",
    "sampling.": "sampling_params.",
    "stop.strings": "sampling_params.stop",
    "stop.token_ids": "sampling_params.stop_token_ids",
    "stop.": "sampling_params.",
    "output.top_logprobs": "sampling_params.logprobs",
    "format.lark": "sampling_params.grammar",
    "format.": "sampling_params.",
}
"""Names of GenerationService's fields, or how they begin, and those of this service; the first that fits counts."""
_NEEDS_VISION = "is not served: the model reads text alone"
_NO_TRANSFER = "is not served: KV pages are not moved between servers"
_REFUSED = {
    "mm_inputs": _NEEDS_VISION,
    "extra_mm_inputs": _NEEDS_VISION,
    "media_refs": _NEEDS_VISION,
    "kv_transfer_params": _NO_TRANSFER,
    "kv_transfer_params_json": _NO_TRANSFER,
}
_NOT_SERVED = {
    "Embed": "this server generates text, and has no embeddings",
    "FlushCache": "cached prefixes belong to tenants; MemoryService.PurgeMemory removes what was learned",
    "StartProfile": "there is no profiler",
    "StopProfile": "there is no profiler",
    "SubscribeKvEvents": "no events of KV pages are sent",
}
"""Methods of the contract that are refused, with the reason."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class VllmEngineServicer:
    """The methods of VllmEngine.

    Args:
        generation: answers the requests.
        is_serving: what health says.
    """

    def __init__(
        self, generation: GenerationServicer, serving: Serving, bridge: EngineBridge, is_serving: Callable[[], bool]
    ) -> None:
        self._generation = generation
        self._serving = serving
        self._bridge = bridge
        self._is_serving = is_serving
        self._started_at = time.monotonic()
        self._archive: asyncio.Task[bytes] | None = None

    @property
    def methods(self) -> dict[str, Run]:
        """What answers each method of the service."""
        return {
            "Generate": self.generate,
            "Abort": self.abort,
            "HealthCheck": self.health_check,
            "GetModelInfo": self.get_model_info,
            "GetServerInfo": self.get_server_info,
            "GetLoads": self.get_loads,
            "GetTokenizer": self.get_tokenizer,
            **{name: _refusal(name, reason) for name, reason in _NOT_SERVED.items()},
        }

    async def generate(self, request: pb.GenerateRequest, call: Call) -> None:
        """Streams chunks and one GenerateComplete for each sample; without `stream` only these."""
        tenant = _tenant(call)
        try:
            asked = as_native(request, self._serving.model.vocab_size)
        except InvalidValueError as error:
            self._generation.refuse(error, call, tenant)
        asked.tenant = tenant
        try:
            async with self._generation.submitted(asked, call, padded=False) as answering:
                await self._answer(answering, call, whole=not request.stream)
        except InvalidValueError as error:
            _rename(error)
            raise

    async def _answer(self, answering: Answering, call: Call, whole: bool) -> None:
        messages, shaping = answering.messages, answering.shaping
        samples = messages.samples
        outputs = [Output(sample=index) for index in range(len(samples))]
        async with Writer(call.context, self._serving.settings.stall_timeout) as writer:
            try:
                if whole:
                    outputs = await gather(answering.stream, shaping)
                    finishes = [output.finish for output in outputs if output.finish is not None]
                else:
                    chunks = _Chunks(samples, messages.readers, messages.with_details, messages.token_bytes)
                    finishes = await relay(answering.stream, writer, chunks, shaping)
            except AbortedError:
                finishes = [Finish(FinishReason.CANCELLED)] * len(samples)
            await answering.release()  # a client may send its next request once it has read the end
            for sample, finish, written in zip(samples, finishes, outputs, strict=True):
                await writer.write(_complete(sample, finish, written))
        answering.ended(finishes)

    async def abort(self, request: pb.AbortRequest, call: Call) -> pb.AbortResponse:
        """Ends the requests of the caller's tenant that have these ids. Others, and ids of none, are left alone."""
        self._bridge.abort(call.principal.tenant_for(_tenant(call)), set(request.request_ids))
        return pb.AbortResponse()

    async def health_check(self, request: pb.HealthCheckRequest, call: Call) -> pb.HealthCheckResponse:
        serving = self._is_serving()
        return pb.HealthCheckResponse(healthy=serving, message="serving" if serving else "not serving")

    async def get_model_info(self, request: pb.GetModelInfoRequest, call: Call) -> pb.GetModelInfoResponse:
        model = self._serving.model
        defaults = asdict(model.defaults.sampling)
        return pb.GetModelInfoResponse(
            served_model_name=model.name,
            # No name of the hub: a gateway would read the tokenizer there before it asks for it here.
            tokenizer_path=f"/served/{model.name}",
            is_generation=True,
            max_context_length=model.max_context,
            max_req_input_len=model.max_context - 1,
            vocab_size=model.vocab_size,
            architectures=[model.architecture],
            eos_token_ids=sorted(model.eos_token_ids),
            default_sampling_params_json=json.dumps({name: defaults[name] for name in _SAMPLING}),
        )

    async def get_server_info(self, request: pb.GetServerInfoRequest, call: Call) -> pb.GetServerInfoResponse:
        """Operators also get the number of requests, which says something of other tenants."""
        model = self._serving.model
        return pb.GetServerInfoResponse(
            server_type="vllm-grpc",  # the contract's name for servers of it
            is_paused=not self._is_serving(),
            uptime_seconds=time.monotonic() - self._started_at,
            active_requests=self._bridge.live if call.principal.role is Role.OPERATOR else 0,
            data_parallel_size=1,
            max_num_seqs=self._serving.settings.max_running,
            model_dtype=f"torch.{model.dtype}",
            constrained_decoding_start="first_token",
        )

    async def get_loads(self, request: pb.GetLoadsRequest, call: Call) -> pb.GetLoadsResponse:
        report = self._bridge.reports.latest
        running, waiting = report.load.running, report.load.waiting
        load = pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            token_usage=report.kv.held / max(report.kv.total, 1),
            max_running_requests=self._serving.settings.max_running,
        )
        now = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=now, version=version("draftwood"), dp_rank_count=1, loads=[load])

    async def get_tokenizer(self, request: common_pb2.GetTokenizerRequest, call: Call) -> None:
        """Streams the tokenizer's files as a zip archive, with its SHA-256 in the last message."""
        if self._archive is None or (self._archive.done() and self._archive.exception() is not None):
            self._archive = asyncio.create_task(asyncio.to_thread(_archived, self._serving))
        data = await asyncio.shield(self._archive)
        async with Writer(call.context, self._serving.settings.stall_timeout) as writer:
            for start in range(0, len(data), _CHUNK_BYTES):
                last = start + _CHUNK_BYTES >= len(data)
                digest = hashlib.sha256(data).hexdigest() if last else ""
                chunk = common_pb2.GetTokenizerChunk(data=data[start : start + _CHUNK_BYTES], sha256=digest)
                await writer.write(chunk)


class _Chunks(AnswerMessages):
    """The chunks of a stream, of token ids alone."""

    def read(self, output: Output) -> list[native.Part]:
        return []

    def delta(self, output: Output, parts: SequenceOf[native.Part]) -> Any:
        sample = self.samples[output.sample]
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=output.token_ids,
                prompt_tokens=sample.request.prompt.size,
                completion_tokens=len(output.token_ids),
                cached_tokens=sample.stats.cached_prompt_tokens,
                output_logprobs=_logprobs(output.token_ids, output.logprobs),
                index=output.sample,
            )
        )


def _complete(sample: Sample, finish: Finish, written: Output) -> pb.GenerateResponse:
    """The end of a sample.

    Args:
        written: what no chunk had.
    """
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=written.token_ids,
            finish_reason=_REASONS[finish.reason],
            prompt_tokens=sample.request.prompt.size,
            completion_tokens=sample.completion_tokens,
            cached_tokens=sample.stats.cached_prompt_tokens,
            output_logprobs=_logprobs(written.token_ids, written.logprobs),
            index=written.sample,
            matched_token_id=finish.stop_token_id,
            matched_stop_str=finish.stop_string,
            spec_accepted_tokens=sample.stats.accepted_tokens,
            spec_draft_tokens=sample.stats.draft_tokens,
        )
    )


def as_native(message: pb.GenerateRequest, vocab_size: int) -> native.GenerateRequest:
    """The same request for GenerationService, without a tenant. What it checks itself is not checked here.

    A number without presence is meant as it stands, as vLLM reads it: `top_k` 0 keeps every token. Only 0 of `top_p`,
    `repetition_penalty`, `n` and `min_tokens`, which would mean nothing, leaves the default. So does an unset
    temperature: here that is the tenant's or the model's.

    Raises:
        InvalidInputError: a field cannot be served, with its name in this service.
    """
    params = message.sampling_params
    _refuse(message)
    asked = native.GenerateRequest(
        request_id=message.request_id,
        sampling=native.SamplingOptions(
            temperature=params.temperature if params.HasField("temperature") else None,
            top_k=min(params.top_k, _INT32),
            top_p=params.top_p or None,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty or None,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=params.seed % 2**64 if params.HasField("seed") else None,
            logit_bias=dict(params.logit_bias),
            n=min(params.n, _INT32) or None,
        ),
        stop=native.StopOptions(
            max_tokens=min(params.max_tokens, _INT32) if params.HasField("max_tokens") else None,
            min_tokens=min(params.min_tokens, _INT32) or None,
            strings=params.stop,
            token_ids=_ids("sampling_params.stop_token_ids", params.stop_token_ids, vocab_size),
            ignore_eos=params.ignore_eos,
        ),
        output=native.OutputOptions(top_logprobs=params.logprobs if params.HasField("logprobs") else None),
        format=_format(params),
    )
    match message.WhichOneof("input"):
        case "tokenized":
            asked.token_ids.ids.extend(_ids("tokenized.input_ids", message.tokenized.input_ids, vocab_size))
            asked.token_ids.SetInParent()
        case "text":
            asked.text = message.text
        case _:
            raise InvalidInputError("input", None, "one of tokenized and text must be set")
    return asked


def _refuse(message: pb.GenerateRequest) -> None:
    for field, _ in message.ListFields():
        if field.name in _REFUSED:
            raise InvalidInputError(field.name, None, _REFUSED[field.name])
    if message.data_parallel_rank:
        raise InvalidValueError("data_parallel_rank", message.data_parallel_rank, "this server has rank 0 alone")
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if message.sampling_params.HasField(name):
            raise InvalidInputError(f"sampling_params.{name}", None, "is not served; leave it unset")


def _ids(field: str, given: SequenceOf[int], vocab_size: int) -> list[int]:
    """Token ids, which here may be larger than an int32. Raises InvalidValueError for one beyond the vocabulary."""
    ids = list(given)
    if max(ids, default=0) >= vocab_size:
        index = next(at for at, token in enumerate(ids) if token >= vocab_size)
        allowed = f"it must lie in [0, {vocab_size - 1}], the model's vocabulary"
        raise InvalidValueError(f"{field}[{index}]", ids[index], allowed)
    return ids


def _format(params: pb.SamplingParams) -> native.OutputFormat | None:
    """Raises InvalidInputError for a kind of constraint that is not served."""
    match params.WhichOneof("constraint"):
        case "json_schema":
            return native.OutputFormat(json_schema=params.json_schema)
        case "regex":
            return native.OutputFormat(regex=params.regex)
        case "grammar":
            if "::=" in params.grammar:
                raise InvalidInputError("sampling_params.grammar", None, "is EBNF; a grammar must be in Lark's syntax")
            return native.OutputFormat(lark=params.grammar)
        case "json_object" if params.json_object:
            return native.OutputFormat(json_schema='{"type": "object"}')
        case "choice":
            if not params.choice.choices or "" in params.choice.choices:
                raise InvalidInputError("sampling_params.choice", None, "must have texts, none of them empty")
            return native.OutputFormat(lark="start: " + " | ".join(map(json.dumps, params.choice.choices)))
        case "structural_tag":
            known = "json_schema, regex, grammar, json_object and choice are"
            raise InvalidInputError("sampling_params.structural_tag", None, f"is not served; {known}")
    return None


def _logprobs(tokens: SequenceOf[int], logprobs: SequenceOf[TokenLogprobs]) -> pb.OutputLogProbs | None:
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[one.logprob for one in logprobs],
        token_ids=tokens,
        top_logprobs=[pb.TopLogProbs(values=one.top_logprobs, token_ids=one.top_token_ids) for one in logprobs],
    )


def _tenant(call: Call) -> str:
    """The tenant that the call's metadata names; "" if they name none. Raises InvalidInputError for several."""
    named = [str(value) for key, value in call.context.invocation_metadata() or () if key == TENANT]
    if len(named) > 1:
        raise InvalidInputError(TENANT, None, f"is there {len(named)} times; once is allowed")
    return named[0] if named else ""


def _rename(error: InvalidValueError) -> None:
    """Gives the field its name in this service, in the text too, which begins with it."""
    for ours, theirs in _FIELDS.items():
        if error.field.startswith(ours):
            text, field = str(error), error.field
            error.field = theirs + field[len(ours) :]
            if text.startswith(field):
                error.args = (error.field + text[len(field) :],)
            return


def _refusal(method: str, reason: str) -> Run:
    async def refuse(request: Any, call: Call) -> None:
        raise NotServedError(method, reason)

    return refuse


def _archived(serving: Serving) -> bytes:
    """The tokenizer's files, zipped."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as into:
        for name, content in serving.model.tokenizer.files().items():
            into.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()
