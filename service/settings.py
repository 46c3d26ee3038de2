"""All settings of the service, each written down once: flags, environment, YAML keys and help come from the fields.

A value is taken from the first of: command-line flag, environment variable, YAML file, default.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from model_runner.errors import InvalidValueError
from model_runner.loading.checkpoint import BUNDLED_MODEL

_MIB = 1024 * 1024


class Settings(BaseModel):
    """One consistent, frozen set of settings. Durations are in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str | None = Field(default=None, description="Folder or hub id of the model; unset serves the bundled one")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="What the model computes in"
    )
    max_context: int | None = Field(
        default=None, ge=2, description="Tokens of prompt and answer; unset takes the model's own"
    )
    exact: bool | None = Field(
        default=None,
        description="Rounding must not depend on drafts and batch, on CPUs; unset does so in less than float32",
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads of a step at most; unset takes all cores")

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all")
    port: int = Field(default=50051, ge=0, le=65535, description="Port to listen on; 0 takes any free one")
    ready_file: Path | None = Field(default=None, description="Write HOST:PORT to this file once requests are served")
    tls_cert: Path | None = Field(default=None, description="PEM certificate chain; set it to serve TLS")
    tls_key: Path | None = Field(default=None, description="PEM private key of the certificate")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM authorities; set it to demand client certificates"
    )

    max_running: int = Field(default=8, ge=1, le=4096, description="Requests that decode together")
    max_waiting: int = Field(default=64, ge=0, le=1_000_000, description="Requests that wait for their turn")
    kv_cache_tokens: int | None = Field(
        default=None, ge=1, description="Tokens whose keys and values fit in memory; unset takes half of what is free"
    )
    prefix_cache: bool = Field(
        default=True, description="Keep what a tenant's requests began with for its later ones that begin so"
    )
    prefill_chunk: int = Field(default=512, ge=1, description="Prompt tokens a step while nothing decodes")
    shared_prefill_chunk: int = Field(default=128, ge=1, description="Prompt tokens a step beside decoding requests")
    tenant_weights: dict[str, float] = Field(
        default={}, description="Tenants' shares of the engine, as in acme=2,beta=0.5; 1 for all others"
    )
    strategy: str = Field(
        default="hybrid", description="Who drafts for requests that name no strategy; none for nobody"
    )
    max_draft_nodes: int = Field(default=48, ge=0, le=1024, description="Draft nodes a step and request")
    max_tenants: int = Field(default=1000, ge=1, description="Tenants whose memory is ready for use")

    store: str = Field(
        default="memory",
        description="Where memories rest: memory (this process alone), embedded (a server of our own on a folder), or"
        " redis://, rediss://, redis+sentinel://, redis+cluster://",
    )
    store_folder: Path | None = Field(
        default=None, description="The embedded store's data; unset takes ~/.local/share/draftwood/store"
    )
    store_bytes: int = Field(default=1024 * _MIB, ge=8 * _MIB, description="Memory of the embedded store at most")
    store_timeout: float = Field(default=2.0, gt=0, description="Seconds that the store may take to answer")
    store_tls_ca: Path | None = Field(default=None, description="PEM authorities of a store with TLS")
    store_tls_cert: Path | None = Field(default=None, description="PEM certificate to show to the store")
    store_tls_key: Path | None = Field(default=None, description="PEM private key of that certificate")
    store_keys: str | None = Field(
        default=None, repr=False, description="Keys that encrypt the store's values; better in the environment"
    )
    store_key_file: Path | None = Field(default=None, description="File of such keys")
    memory_tokens: int = Field(default=1_000_000, ge=1024, description="Tokens of a tenant's memory")
    memory_bytes: int = Field(default=16 * _MIB, ge=65536, description="Bytes of a tenant's memory in the store")
    memory_ttl: float = Field(
        default=0.0, ge=0, description="Seconds after which a tenant that learns nothing is forgotten; 0 for never"
    )
    memory_idle: float = Field(default=900.0, gt=0, description="Seconds until an idle tenant's memory leaves RAM")
    memory_preload: int = Field(default=16, ge=0, description="Memories, the latest, that a new process fetches")

    max_message_bytes: int = Field(default=16 * _MIB, ge=1024, le=2**31 - 1, description="Largest request in bytes")
    default_timeout: float = Field(default=600.0, gt=0, description="Seconds for a request that brings no deadline")
    max_timeout: float = Field(default=3600.0, gt=0, description="Seconds for any request")
    stream_interval: float = Field(
        default=0.03,
        ge=0,
        le=60,
        description="Seconds between two messages of a stream at least, the first and the last excepted",
    )
    stall_timeout: float = Field(default=30.0, gt=0, description="Seconds that a message waits for its reader")
    drain_grace: float = Field(default=20.0, ge=0, description="Seconds that live requests get at shutdown")
    keepalive: float = Field(default=45.0, ge=1, description="Seconds between pings to a quiet client")
    max_connection_age: float = Field(
        default=1800.0, ge=0, description="Seconds until a client must reconnect; 0 for never"
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is logged"
    )
    log_format: Literal["console", "json"] = Field(default="console", description="How log lines look")

    @property
    def model_path(self) -> str:
        """Folder or hub id of the model."""
        return BUNDLED_MODEL if self.model is None else self.model

    @field_validator("tenant_weights", mode="before")
    @classmethod
    def _weights(cls, given: object) -> object:
        """From a flag or the environment, "acme=2,beta=0.5"; a mapping from YAML."""
        if not isinstance(given, str):
            return given
        pairs = [part.rpartition("=") for part in given.split(",") if part.strip()]
        if not all(name.strip() and weight.strip() for name, _, weight in pairs):
            raise ValueError("it must look like acme=2,beta=0.5")
        return {name.strip(): weight for name, _, weight in pairs}

    @field_validator("tenant_weights")
    @classmethod
    def _positive(cls, weights: dict[str, float]) -> dict[str, float]:
        for tenant, weight in weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"{tenant}'s weight must be above 0")
        return weights

    @field_validator("store")
    @classmethod
    def _known_store(cls, given: str) -> str:
        if given not in ("memory", "embedded"):
            from service.memory.store.redis_client import (
                RedisClient,  # the library takes a while, which --help need not pay
            )

            RedisClient(given)
        return given

    @field_validator("strategy")
    @classmethod
    def _known_strategy(cls, name: str) -> str:
        from strategies import names  # numba takes most of a second, which --help need not pay

        if name not in names():
            raise ValueError(f"it must be one of {', '.join(names())}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, present = ("tls_key", "tls_cert") if self.tls_key is None else ("tls_cert", "tls_key")
            raise InvalidValueError(missing, None, f"it must be set, since {present} is")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidValueError("tls_cert", None, "it must be set, since tls_client_ca is")
        if self.default_timeout > self.max_timeout:
            allowed = f"it must be at most max_timeout = {self.max_timeout:g}"
            raise InvalidValueError("default_timeout", self.default_timeout, allowed)
        if (self.store_tls_cert is None) != (self.store_tls_key is None):
            missing = "store_tls_key" if self.store_tls_key is None else "store_tls_cert"
            raise InvalidValueError(missing, None, "it must be set, since the other of the two is")
        files = ("store_tls_ca", "store_tls_cert", "store_tls_key", "store_key_file")
        for key in ("tls_cert", "tls_key", "tls_client_ca", *files):
            path: Path | None = getattr(self, key)
            if path is not None and not path.is_file():
                raise InvalidValueError(key, str(path), "it must be a file that exists")
        return self


def default_shown(key: str) -> str:
    """The default of a field as a user writes it; "unset" where there is none."""
    default: Any = Settings.model_fields[key].default
    if default is None or default == {}:
        return "unset"
    return f"{default:g}" if isinstance(default, float) else str(default)
