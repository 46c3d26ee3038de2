"""Where the service listens, who may call it, and who watches it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.settings.group import Items, SettingsGroup
from draftwood_service.starting.listening import is_loopback, is_url

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
