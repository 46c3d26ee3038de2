"""All settings of the service, each defined once: flags, environment, YAML keys and help are made from the fields.

A value is taken from the first of: command-line flag, environment variable, YAML file, default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from draftwood_memory.errors import InvalidSettingError
from draftwood_memory.settings.memory_settings import cache_folder, check_store, definition_of, size_of
from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_service.engine_settings import ENGINE_DEFAULTS, check_engine
from draftwood_tenants.shaping import DeltaShaping

_MIB = 1024 * 1024
Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signatures by key pairs. With an HMAC (HS256), whoever knows the public key could sign."""


@contextmanager
def named_settings() -> Iterator[None]:
    """Raises InvalidInputError for what the memory says of a setting."""
    try:
        yield
    except InvalidSettingError as error:
        raise InvalidInputError(error.field, error.value, error.problem) from None


def _shared(name: str) -> Any:
    """A setting that plug-ins of other engines have as well, defined in `draftwood_memory.settings`."""
    return Field(**definition_of(name))


class Settings(BaseModel):
    """One consistent, frozen set of settings. Durations are in seconds, sizes in bytes or with a suffix K, M or G.

    Bounds of the engine's own values are checked by `EngineConfig`, all others here. Defaults that were measured, with
    the measurement in docs/decisions: prefill_chunk and shared_prefill_chunk ("Prompts beside decoding requests"),
    stream_interval ("Threads that spin"), memory_tokens (`draftwood bench memory` and `share`). The others are not
    tuned: values near them work as well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str | None = Field(default=None, description="Folder or hub id of the model; unset: the bundled model")
    engine: Literal["draftwood", "vllm"] = Field(
        default="draftwood",
        description="What runs the model: draftwood, Draftwood's own engine, or vllm, for several machines' worth of"
        " GPUs and all that vLLM serves (pip install 'draftwood[vllm]')",
    )
    engine_args: dict[str, Any] = Field(
        default={},
        description='Further engine arguments of vLLM, as a JSON object such as {"quantization": "fp8"} (engine vllm)',
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Data type of the model's computation"
    )
    max_context: int | None = Field(
        default=None,
        ge=2,
        description="Maximum number of prompt and output tokens of a request; unset: the model's maximum",
    )
    exact: bool | None = Field(
        default=None,
        description="Make logits independent of drafts and batch, bit by bit (runner torch on CPUs, and runner cuda);"
        " unset: only with runner torch on CPUs, below float32",
    )
    runner: Literal["auto", "cuda", "openvino", "torch"] = Field(
        default="auto",
        description="What computes the steps; auto: cuda on GPUs, openvino on CPUs, for models that they support,"
        " else torch",
    )
    weights: Literal["as-is", "int8", "int4"] = Field(
        default="as-is",
        description="Weights in memory; as-is: in the data type of the computation, int8, int4: quantized to 8 or 4"
        " bits (runner openvino)",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, description="GPUs that share the model: of this machine (runner cuda), or of vLLM's"
    )
    generation_defaults: Literal["model", "greedy"] = Field(
        default="model",
        description="Where defaults of requests come from: the model's generation_config.json, or greedy decoding",
    )
    threads: int | None = Field(
        default=None, description="CPU threads of a step; unset: all cores, within the CPU quota of the container"
    )
    model_cache: bool = Field(
        default=True, description="Keep models that OpenVINO converted on disk, so that the next start is shorter"
    )
    model_cache_folder: Path | None = Field(
        default=None, description="Folder of converted models; unset: ~/.cache/draftwood/models"
    )

    compiled_functions: Path | None = Field(
        default=None,
        description="Folder of compiled functions, copied at the start to the folder that the environment variable"
        " NUMBA_CACHE_DIR names; an image has one",
    )

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all interfaces")
    port: int = Field(default=50051, ge=0, le=65535, description="Port to listen on; 0 for any free port")
    ready_file: Path | None = Field(default=None, description="File to write HOST:PORT to once requests are served")
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain; enables TLS")
    tls_key: Path | None = Field(default=None, description="PEM private key of the certificate")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM certificate authorities of clients; makes client certificates mandatory"
    )
    health_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Further port with the health service alone, without TLS, for probes that have no certificate",
    )
    reflection: bool = Field(default=True, description="Server reflection, for all who may call")

    auth: Literal["auto", "open"] = Field(
        default="auto",
        description="Who may call; auto: whoever has a credential of auth_file or jwt_jwks, or without these anyone on"
        " this machine; open: anyone who reaches the port, as operator",
    )
    auth_file: Path | None = Field(
        default=None,
        description="YAML file of API keys (see `draftwood key`) and client certificates, read when it changes",
    )
    jwt_jwks: str | None = Field(
        default=None, description="Public keys (JWKS) of the issuer of tokens: a file or an https URL; enables tokens"
    )
    jwt_issuer: str | None = Field(default=None, min_length=1, description="Issuer (iss) that tokens must have")
    jwt_audience: str | None = Field(default=None, min_length=1, description="Audience (aud) that tokens must have")
    jwt_tenant_claim: str = Field(default="tenant", min_length=1, description="Claim with the caller's tenant")
    jwt_role_claim: str = Field(
        default="role", min_length=1, description="Claim with its role: caller (the default), tenant-admin or operator"
    )
    jwt_algorithms: tuple[Algorithm, ...] = Field(
        default=("RS256", "ES256", "EdDSA"), min_length=1, description="Allowed signatures of tokens"
    )
    jwt_leeway: float = Field(
        default=30.0, ge=0, le=300, description="Seconds by which the issuer's clock may differ from this one"
    )

    max_running: int = Field(default=8, le=4096, description="Maximum number of requests that run in one batch")
    max_waiting: int = Field(default=64, ge=0, le=1_000_000, description="Maximum number of waiting requests")
    kv_cache_tokens: int | None = Field(
        default=None,
        description="Capacity of the KV cache in tokens; unset: max_running full contexts, limited by free memory",
    )
    prefix_cache: bool = Field(default=True, description="Reuse the KV cache of common prompt prefixes within a tenant")
    prefill_chunk: int = Field(default=512, description="Prompt tokens of a step in which no request decodes")
    shared_prefill_chunk: int = Field(default=128, description="Prompt tokens of a step in which requests decode")
    tenant_weights: dict[str, float] = Field(
        default={}, description="Scheduling weights of tenants, such as acme=2,beta=0.5; 1 for all others"
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, description="Requests of a tenant admitted in any 60 s, over all servers of the store"
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of prompts and answers of the requests of a tenant admitted in any 60 s, over all servers"
        " of the store",
    )
    concurrency: int | None = Field(
        default=None, ge=1, description="Requests of a tenant that run or wait at once, over all servers of the store"
    )
    strategy: str = _shared("strategy")
    max_draft_nodes: int = _shared("max_draft_nodes")
    audit_share: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of requests whose answers are decoded again without drafting in idle time, and compared",
    )
    max_tenants: int = _shared("max_tenants")

    tenants_file: Path | None = Field(
        default=None,
        description="YAML file of tenants and experiments, read when it changes; those that it names cannot be changed"
        " over the API",
    )

    store: str = _shared("store")
    store_folder: Path | None = _shared("store_folder")
    store_bytes: int = _shared("store_bytes")
    store_timeout: float = _shared("store_timeout")
    store_tls_ca: Path | None = _shared("store_tls_ca")
    store_tls_cert: Path | None = _shared("store_tls_cert")
    store_tls_key: Path | None = _shared("store_tls_key")
    store_keys: str | None = _shared("store_keys")
    store_key_file: Path | None = _shared("store_key_file")
    memory_tokens: int = _shared("memory_tokens")
    memory_bytes: int = _shared("memory_bytes")
    memory_max_bytes: int | None = _shared("memory_max_bytes")
    memory_ttl: float = _shared("memory_ttl")
    memory_max_age: float = _shared("memory_max_age")
    memory_orphan_ttl: float = _shared("memory_orphan_ttl")
    memory_idle: float = _shared("memory_idle")
    memory_preload: int = _shared("memory_preload")

    max_message_bytes: int = Field(
        default=4 * _MIB, ge=1024, le=2**31 - 1, description="Maximum size of a request in bytes"
    )
    max_prompt_characters: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of characters of a prompt, all chat messages together; unset: 16 for each token of"
        " the context, at least 65,536",
    )
    max_chat_messages: int = Field(default=1024, ge=1, description="Maximum number of chat messages of a prompt")
    default_timeout: float = Field(default=600.0, gt=0, description="Seconds for a request without a deadline")
    max_timeout: float = Field(default=3600.0, gt=0, description="Maximum number of seconds for any request")
    stream_interval: float = Field(
        default=0.03,
        ge=0,
        le=60,
        description="Minimum number of seconds between two messages of a stream, except the first and the last",
    )
    delta_cadence: float = Field(
        default=0.0,
        description="Seconds between two deltas of an answer, sent with or without new tokens, so that times reveal"
        " nothing of them; 0 sends tokens as they come",
    )
    delta_padding: int = Field(
        default=0,
        description="Size in bytes that each message of an answer is filled up to a multiple of, so that sizes reveal"
        " nothing of it; 0 for no padding",
    )
    delta_rounding: int = Field(
        default=1,
        description="With delta_cadence: the number of deltas of an answer is rounded up to a multiple of this",
    )
    stall_timeout: float = Field(
        default=30.0, gt=0, description="Seconds until a request ends when its client does not read"
    )
    engine_restarts: int = Field(
        default=2,
        ge=0,
        description="How often an engine process that died is started anew before the service exits with status 1",
    )
    engine_stall_timeout: float = Field(
        default=300.0,
        gt=0,
        description="Seconds without a sign of life of the engine until the health service `liveness` is NOT_SERVING",
    )
    drain_grace: float = Field(
        default=25.0,
        ge=0,
        description="Seconds for the whole shutdown, three quarters of them for live requests to finish; less than"
        " Kubernetes' 30",
    )
    keepalive: float = Field(default=45.0, ge=1, description="Seconds between pings to an idle client")
    max_connection_age: float = Field(
        default=1800.0, ge=0, description="Seconds until a client must reconnect; 0 for never"
    )

    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port where Prometheus collects metrics; unset: none"
    )
    metrics_host: str | None = Field(default=None, min_length=1, description="Address of that port; unset: host")
    metrics_tenants: tuple[str, ...] = Field(
        default=(), max_length=100, description="Tenants that metrics show by name; the others are shown together"
    )
    metrics_vllm_names: bool = Field(
        default=False,
        description="Show the load at that port under vLLM's names too (vllm:num_requests_waiting,"
        " vllm:num_requests_running, vllm:kv_cache_usage_perc), for endpoint pickers that know no others",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="Collector for metrics, traces and logs by OpenTelemetry, such as http://otel:4317; unset:"
        " OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )
    trace_share: float = Field(
        default=0.05, ge=0, le=1, description="Share of calls that are traced, of those whose caller has not decided"
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Minimum log level")
    log_format: Literal["console", "json"] = Field(default="console", description="Format of log lines")

    @property
    def model_path(self) -> str:
        """Folder or hub id of the model."""
        return BUNDLED_MODEL if self.model is None else self.model

    @property
    def cache_folder(self) -> Path | None:
        """Folder of what the next start finds: converted models, and a note on each store; None for none."""
        if not self.model_cache or self.model_cache_folder is not None:
            return self.model_cache_folder if self.model_cache else None
        return cache_folder(os.environ)

    @property
    def memory_budget(self) -> int:
        """Bytes of all tenants' memories in RAM."""
        # Imported here, as it brings the rest of the memory.
        from draftwood_memory.config import default_max_bytes

        return default_max_bytes() if self.memory_max_bytes is None else self.memory_max_bytes

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the port."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def has_credentials(self) -> bool:
        """Whether calls need a credential."""
        return self.auth_file is not None or self.jwt_jwks is not None

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's part. Raises InvalidValueError for a value outside its range."""
        return EngineConfig(
            max_running=self.max_running,
            max_draft_nodes=self.max_draft_nodes,
            prefill_chunk=self.prefill_chunk,
            shared_prefill_chunk=self.shared_prefill_chunk,
            kv_cache_tokens=self.kv_cache_tokens,
            prefix_cache=self.prefix_cache,
            tenant_weights=self.tenant_weights,
            threads=self.threads,
        )

    @property
    def delta_shaping(self) -> DeltaShaping:
        """How answers are sent. Raises InvalidValueError for a value outside its range."""
        try:
            return DeltaShaping(self.delta_cadence, self.delta_padding, self.delta_rounding)
        except InvalidValueError as error:
            raise InvalidValueError(f"delta_{error.field}", error.value, error.allowed) from None

    @field_validator(
        "store_bytes", "memory_bytes", "memory_max_bytes", "max_message_bytes", "delta_padding", mode="before"
    )
    @classmethod
    def _size(cls, given: object) -> object:
        """A number of bytes, or of KiB, MiB or GiB with the suffix K, M or G."""
        return size_of(given)

    @field_validator("tenant_weights", mode="before")
    @classmethod
    def _weights(cls, given: object) -> object:
        """From a flag or the environment, "acme=2,beta=0.5"; a mapping from YAML."""
        if not isinstance(given, str):
            return given
        pairs = [part.rpartition("=") for part in given.split(",") if part.strip()]
        if not all(name.strip() and weight.strip() for name, _, weight in pairs):
            raise InvalidInputError("tenant_weights", given, "must look like acme=2,beta=0.5")
        return {name.strip(): weight for name, _, weight in pairs}

    @field_validator("engine_args", mode="before")
    @classmethod
    def _json_object(cls, given: object) -> object:
        """From a flag or the environment, JSON; a mapping from YAML."""
        if not isinstance(given, str):
            return given
        try:
            found = json.loads(given)
        except ValueError as error:
            raise InvalidInputError("engine_args", given, f"must be a JSON object: {error}") from None
        if not isinstance(found, dict):
            raise InvalidInputError("engine_args", given, "must be a JSON object")
        return found

    @field_validator("jwt_algorithms", "metrics_tenants", mode="before")
    @classmethod
    def _items(cls, given: object) -> object:
        """From a flag or the environment, "RS256,ES256"; a list from YAML."""
        return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, given: str | None) -> str | None:
        if given is not None and not given.startswith(("http://", "https://")):
            raise ValueError("it must begin with http:// or https://")
        return given

    @field_validator("store")
    @classmethod
    def _known_store(cls, given: str) -> str:
        if given not in ("memory", "embedded"):
            # Imported here: the Redis library takes a while to import, which --help need not wait for.
            from draftwood_memory.store.redis_client import RedisClient

            with named_settings():
                RedisClient(given)
        return given

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, name: str) -> str:
        # Imported here: numba takes most of a second to import, which --help need not wait for.
        from draftwood_strategies import strategy_names

        if name not in strategy_names():
            raise ValueError(f"it must be one of {', '.join(strategy_names())}")
        return name

    @model_validator(mode="before")
    @classmethod
    def _of_engine(cls, given: Any) -> Any:
        """The engine's own defaults, where they are others than those of Draftwood's engine."""
        engine = given.get("engine") if isinstance(given, dict) else None
        return {**ENGINE_DEFAULTS.get(str(engine), {}), **given}

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        _ = self.engine_config, self.delta_shaping
        _require_both(self, "tls_cert", "tls_key")
        with named_settings():
            check_store(self)
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidInputError("tls_cert", None, "must be set, since tls_client_ca is set")
        _check_auth(self)
        check_engine(self)
        if self.default_timeout > self.max_timeout:
            allowed = f"it must be at most max_timeout = {self.max_timeout:g}"
            raise InvalidValueError("default_timeout", self.default_timeout, allowed)
        for key in ("tls_cert", "tls_key", "tls_client_ca", "auth_file", "tenants_file"):
            path: Path | None = getattr(self, key)
            if path is not None and not path.is_file():
                raise InvalidInputError(key, path, "no such file")
        return self


def _check_auth(settings: Settings) -> None:
    """Raises InvalidInputError for settings that contradict each other, or would let the network in without asking."""
    jwt = ("jwt_jwks", "jwt_issuer", "jwt_audience")
    for key in jwt:
        _require_both(settings, key, jwt[0] if key != jwt[0] else jwt[1])
    if settings.jwt_jwks is not None and "://" in settings.jwt_jwks and not settings.jwt_jwks.startswith("https://"):
        raise InvalidInputError("jwt_jwks", settings.jwt_jwks, "must be a file or an https URL")
    if settings.auth == "open":
        for key in ("auth_file", "jwt_jwks"):
            if getattr(settings, key) is not None:
                raise InvalidInputError("auth", "open", f"cannot be combined with {key}")
    elif not (settings.has_credentials or settings.is_local):
        problem = (
            "is not a loopback address, and without authentication anyone could call: set auth_file (API keys, made by"
            " `draftwood key create`, or client certificates) or jwt_jwks (tokens), or ask for it with --auth open"
        )
        raise InvalidInputError("host", settings.host, problem)


def _require_both(settings: Settings, *keys: str) -> None:
    """Raises InvalidInputError if one of two settings is set and the other is not."""
    for missing, present in (keys, reversed(keys)):
        if getattr(settings, missing) is None and getattr(settings, present) is not None:
            raise InvalidInputError(missing, None, f"must be set, since {present} is set")


def default_shown(key: str) -> str:
    """The default of a field as a user writes it; "unset" if there is none."""
    default: Any = Settings.model_fields[key].default
    if default is None or default == {}:
        return "unset"
    if isinstance(default, tuple):
        return ",".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)
