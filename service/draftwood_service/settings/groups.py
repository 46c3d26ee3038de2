"""The settings of the service but those of its engine, in the groups of their purposes, and what all groups share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from draftwood_memory.settings import MemorySettings, check_store, definition_of, size_of
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_service.starting import is_loopback, is_url
from draftwood_tenants.config import DeltaShaping, RateLimits

T = TypeVar("T")


class SettingsGroup(BaseModel):
    """Settings of one purpose. `Settings` inherits from all groups, so that each setting has one flat, public name.

    What needs one group alone takes that as its argument. The first line of a group's docstring is its heading in help,
    and the text below a field is the field's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join(str(field.description).split())

    @classmethod
    def heading(cls) -> str:
        """For help and documentation."""
        return str(cls.__doc__).splitlines()[0].rstrip(".")

    def require_both(self, *keys: str) -> None:
        """Raises InvalidInputError if one of two settings is set and the other is not."""
        for missing, present in (keys, reversed(keys)):
            if getattr(self, missing) is None and getattr(self, present) is not None:
                raise InvalidInputError(missing, None, f"must be set, since {present} is set")


def shared(name: str) -> Any:
    """A setting that plug-ins of other engines have as well, defined in `draftwood_memory.settings`."""
    return Field(**definition_of(name))


def _items(given: object) -> object:
    return [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given


def _weights(given: object) -> object:
    if not isinstance(given, str):
        return given
    pairs = [part.rpartition("=") for part in given.split(",") if part.strip()]
    if not all(name.strip() and weight.strip() for name, _, weight in pairs):
        raise InvalidInputError("tenant_weights", given, "must look like acme=2,beta=0.5")
    return {name.strip(): weight for name, _, weight in pairs}


def _json_object(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        parsed = json.loads(given)
    except ValueError as error:
        raise InvalidInputError("engine_args", given, f"must be a JSON object: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidInputError("engine_args", given, "must be a JSON object")
    return parsed


Size = Annotated[int, BeforeValidator(size_of)]
"""A number of bytes, or of KiB, MiB or GiB with the suffix K, M or G."""
OptionalSize = Annotated[int | None, BeforeValidator(size_of)]
Items = Annotated[tuple[T, ...], BeforeValidator(_items)]
"""From a flag or the environment, "RS256,ES256"; a list from YAML."""
Weights = Annotated[dict[str, float], BeforeValidator(_weights)]
"""From a flag or the environment, "acme=2,beta=0.5"; a mapping from YAML."""
JsonObject = Annotated[dict[str, Any], BeforeValidator(_json_object)]
"""From a flag or the environment, JSON; a mapping from YAML."""


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signatures by key pairs. With an HMAC (HS256), whoever knows the public key could sign."""


def _url(given: str | None) -> str | None:
    if given is not None and not is_url(given):
        raise ValueError("it must look like http://HOST:PORT or https://HOST:PORT")
    return given


class ListenSettings(SettingsGroup):
    """Address and TLS."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; 0.0.0.0 for all interfaces"""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port to listen on; 0 for any free port"""
    ready_file: Path | None = None
    """File to write HOST:PORT to once requests are served"""
    tls_cert: Path | None = None
    """PEM certificate chain; enables TLS"""
    tls_key: Path | None = None
    """PEM private key of the certificate"""
    tls_client_ca: Path | None = None
    """PEM certificate authorities of clients; makes client certificates mandatory"""
    health_port: int | None = Field(default=None, ge=0, le=65535)
    """Further port with the health service alone, without TLS, for probes that have no certificate"""
    reflection: bool = True
    """Server reflection, for all who may call"""
    keepalive: float = Field(default=45.0, ge=1)
    """Seconds between pings to an idle client"""
    max_connection_age: float = Field(default=1800.0, ge=0)
    """Seconds until a client must reconnect; 0 for never"""

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the port."""
        return is_loopback(self.host)

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        self.require_both("tls_cert", "tls_key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidInputError("tls_cert", None, "must be set, since tls_client_ca is set")
        return self


class AuthSettings(SettingsGroup):
    """Authentication."""

    auth: Literal["auto", "open"] = "auto"
    """Who may call; auto: whoever has a credential of auth_file or jwt_jwks, or without these anyone on this machine;
    open: anyone who reaches the port, as operator"""
    auth_file: Path | None = None
    """YAML file of API keys (see `draftwood key`) and client certificates, read when it changes"""
    jwt_jwks: str | None = None
    """Public keys (JWKS) of the issuer of tokens: a file or an https URL; enables tokens"""
    jwt_issuer: str | None = Field(default=None, min_length=1)
    """Issuer (iss) that tokens must have"""
    jwt_audience: str | None = Field(default=None, min_length=1)
    """Audience (aud) that tokens must have"""
    jwt_tenant_claim: str = Field(default="tenant", min_length=1)
    """Claim with the caller's tenant"""
    jwt_role_claim: str = Field(default="role", min_length=1)
    """Claim with its role: caller (the default), tenant-admin or operator"""
    jwt_algorithms: Items[Algorithm] = Field(default=("RS256", "ES256", "EdDSA"), min_length=1)
    """Allowed signatures of tokens"""
    jwt_leeway: float = Field(default=30.0, ge=0, le=300)
    """Seconds by which the issuer's clock may differ from this one"""

    @property
    def has_credentials(self) -> bool:
        """Whether calls need a credential."""
        return self.auth_file is not None or self.jwt_jwks is not None

    @model_validator(mode="after")
    def _check_auth(self) -> Self:
        jwt = ("jwt_jwks", "jwt_issuer", "jwt_audience")
        for key in jwt:
            self.require_both(key, jwt[0] if key != jwt[0] else jwt[1])
        if self.jwt_jwks is not None and "://" in self.jwt_jwks and not self.jwt_jwks.startswith("https://"):
            raise InvalidInputError("jwt_jwks", self.jwt_jwks, "must be a file or an https URL")
        for key in ("auth_file", "jwt_jwks"):
            if self.auth == "open" and getattr(self, key) is not None:
                raise InvalidInputError("auth", "open", f"cannot be combined with {key}")
        return self


class TelemetrySettings(SettingsGroup):
    """Metrics, traces and logs."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port where Prometheus collects metrics; unset: none"""
    metrics_host: str | None = Field(default=None, min_length=1)
    """Address of that port; unset: host"""
    metrics_tenants: Items[str] = Field(default=(), max_length=100)
    """Tenants that metrics show by name; the others are shown together"""
    metrics_vllm_names: bool = False
    """Show the load at that port under vLLM's names too (vllm:num_requests_waiting, vllm:num_requests_running,
    vllm:kv_cache_usage_perc), for endpoint pickers that know no others"""
    otlp_endpoint: Annotated[str | None, AfterValidator(_url)] = None
    """Collector for metrics, traces and logs by OpenTelemetry, such as http://otel:4317; unset:
    OTEL_EXPORTER_OTLP_ENDPOINT, or none"""
    trace_share: float = Field(default=0.05, ge=0, le=1)
    """Share of calls that are traced, of those whose caller has not decided"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum log level"""
    log_format: Literal["console", "json"] = "console"
    """Format of log lines"""


class RequestSettings(SettingsGroup):
    """Limits of requests."""

    max_message_bytes: Size = Field(default=4 * 2**20, ge=1024, le=2**31 - 1)
    """Maximum size of a request in bytes"""
    max_prompt_characters: int | None = Field(default=None, ge=1)
    """Maximum number of characters of a prompt, all chat messages together; unset: 16 for each token of the context, at
    least 65,536"""
    max_chat_messages: int = Field(default=1024, ge=1)
    """Maximum number of chat messages of a prompt"""
    default_timeout: float = Field(default=600.0, gt=0)
    """Seconds for a request without a deadline"""
    max_timeout: float = Field(default=3600.0, gt=0)
    """Maximum number of seconds for any request"""

    @model_validator(mode="after")
    def _check_timeouts(self) -> Self:
        if self.default_timeout > self.max_timeout:
            allowed = f"it must be at most max_timeout = {self.max_timeout:g}"
            raise InvalidValueError("default_timeout", self.default_timeout, allowed)
        return self


class StreamSettings(SettingsGroup):
    """Streams.

    The default of stream_interval was measured, see docs/decisions/engine-process.md.
    """

    stream_interval: float = Field(default=0.03, ge=0, le=60)
    """Minimum number of seconds between two messages of a stream, except the first and the last"""
    delta_cadence: float = 0.0
    """Seconds between two deltas of an answer, sent with or without new tokens, so that times reveal nothing of them; 0
    sends tokens as they come"""
    delta_padding: Size = 0
    """Size in bytes that each message of an answer is filled up to a multiple of, so that sizes reveal nothing of it; 0
    for no padding"""
    delta_rounding: int = 1
    """With delta_cadence: the number of deltas of an answer is rounded up to a multiple of this"""

    @property
    def delta_shaping(self) -> DeltaShaping:
        """How answers are sent. Raises InvalidValueError for a value outside its range."""
        try:
            return DeltaShaping(self.delta_cadence, self.delta_padding, self.delta_rounding)
        except InvalidValueError as error:
            raise InvalidValueError(f"delta_{error.field}", error.value, error.allowed) from None


class QuotaSettings(SettingsGroup):
    """Tenants."""

    tenants_file: Path | None = None
    """YAML file of tenants and experiments, read when it changes; those that it names cannot be changed over the API"""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests of a tenant admitted in any 60 s, over all servers of the store"""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers of the requests of a tenant admitted in any 60 s, over all servers of the store"""
    concurrency: int | None = Field(default=None, ge=1)
    """Requests of a tenant that run or wait at once, over all servers of the store"""

    @property
    def rate_limits(self) -> RateLimits:
        """The default limits of tenants."""
        return RateLimits(self.requests_per_minute, self.tokens_per_minute, self.concurrency)


class DraftingSettings(SettingsGroup):
    """Drafting."""

    strategy: str = shared("strategy")
    max_draft_nodes: int = shared("max_draft_nodes")
    device_drafts: Literal["off", "on"] = "off"
    """Drafts of trie, recycling and hybrid: off, by the host; on, on the GPU with runner cuda, if its memory suffices,
    and steps begin while the one before is computed. Not measured on a GPU yet"""
    audit_share: float = Field(default=0.01, ge=0, le=1)
    """Share of requests whose answers are decoded again without drafting in idle time, and compared"""

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, name: str) -> str:
        # Imported here: numba takes most of a second to import, which --help need not wait for.
        from draftwood_strategies.built_in import LOADED_BY
        from draftwood_strategies.drafting import require_strategy

        if name not in LOADED_BY:
            require_strategy("strategy", name)
        return name


class StoreSettings(SettingsGroup):
    """Store and learned caches.

    The default of memory_tokens was measured (docs/decisions/table.md).
    """

    store: str = shared("store")
    store_folder: Path | None = shared("store_folder")
    store_bytes: Size = shared("store_bytes")
    store_timeout: float = shared("store_timeout")
    store_tls_ca: Path | None = shared("store_tls_ca")
    store_tls_cert: Path | None = shared("store_tls_cert")
    store_tls_key: Path | None = shared("store_tls_key")
    store_keys: str | None = shared("store_keys")
    store_key_file: Path | None = shared("store_key_file")
    max_tenants: int = shared("max_tenants")
    memory_tokens: int = shared("memory_tokens")
    memory_bytes: Size = shared("memory_bytes")
    memory_max_bytes: OptionalSize = shared("memory_max_bytes")
    memory_ttl: float = shared("memory_ttl")
    memory_max_age: float = shared("memory_max_age")
    memory_orphan_ttl: float = shared("memory_orphan_ttl")
    memory_idle: float = shared("memory_idle")
    memory_preload: int = shared("memory_preload")

    @property
    def of_memory(self) -> MemorySettings:
        """The same as plug-ins have them."""
        return MemorySettings(**self.model_dump(include={*StoreSettings.model_fields}))

    @property
    def memory_budget(self) -> int:
        """Bytes of all tenants' memories in RAM."""
        # Imported here, as it brings the rest of the memory.
        from draftwood_memory.config import default_max_bytes

        return default_max_bytes() if self.memory_max_bytes is None else self.memory_max_bytes

    @field_validator("store")
    @classmethod
    def _known_store(cls, given: str) -> str:
        if given not in ("memory", "embedded"):
            # Imported here: the Redis library takes a while to import, which --help need not wait for.
            from draftwood_memory.store.redis_client import RedisClient

            RedisClient(given)
        return given

    @model_validator(mode="after")
    def _check_store(self) -> Self:
        check_store(self)
        return self
