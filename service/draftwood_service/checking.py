"""`draftwood serve --check`: what would start, or each reason why it would not. Loads no model and asks no server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from draftwood_memory.errors import DraftwoodMemoryError, InvalidSettingError
from draftwood_memory.settings import check_files
from draftwood_model_runner.errors import DraftwoodError, InvalidInputError, InvalidValueError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.loading.sources import AUTO_HEAD, MTP_HEAD, look_up, require_head
from draftwood_service.auth import auth_file
from draftwood_service.config import CHECK, WITHOUT_MODEL, as_given, check_settings
from draftwood_service.settings import Settings
from draftwood_service.starting import (
    MissingExtraError,
    about_draft_model,
    require_driver,
    require_engine,
    require_free,
    require_pem,
    require_writable,
)
from draftwood_strategies.registry import know_offered

_USAGE_ERROR = 2
_FAILURE = 1
_METRICS = ("opentelemetry", "prometheus_client")
_HEADS = {AUTO_HEAD: "the one that there is for the model", MTP_HEAD: "the MTP module of the model's checkpoint"}


def check(args: list[str], environ: Mapping[str, str]) -> int:
    """Prints what would start on standard output, or what is wrong on standard error, one line for each reason.

    Returns:
        The exit status of `serve`: 0, 2 for bad settings, 1 for what they name.
    """
    checked = check_settings(args, environ)
    if not isinstance(checked, Settings):
        return _report([str(error) for error in checked], _USAGE_ERROR)
    know_offered(checked.model_strategies)
    found: list[str] = []
    problems: list[str] = []
    left_out: tuple[object, ...] = ()
    if f"{CHECK}={WITHOUT_MODEL}" in args and not checked.model_path.startswith("s3:"):  # never served from there
        left_out = (_model, _drafters)
    for look in _LOOKS:
        if look in left_out:
            continue
        try:
            found += look(checked, environ)
        except (InvalidValueError, InvalidSettingError) as error:
            problems.append(str(as_given(error, args, environ)))
        except (DraftwoodError, DraftwoodMemoryError) as error:
            problems.append(str(error))
    if problems:
        return _report(problems, _FAILURE)
    print("\n".join(found))
    return 0


def _report(problems: list[str], status: int) -> int:
    for problem in dict.fromkeys(problems):
        print(f"draftwood serve: {problem}", file=sys.stderr)
    return status


def _engine(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    require_engine(settings.engine)
    yield f"engine: {settings.engine}" + ("" if settings.engine == "vllm" else f", device {settings.device}")


def _device(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    require_driver(settings.device)
    yield from ()


def _model(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    path = settings.model_path
    found = look_up(path, settings.cache_folder, environ)
    yield "model: the bundled demo model" if path == BUNDLED_MODEL else f"model: {found}"


def _drafters(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    require_head(settings.draft_head)
    if settings.draft_model is not None:
        with about_draft_model(settings.draft_model):
            yield f"draft model: {look_up(settings.draft_model, settings.cache_folder, environ)}"
    if "head" in settings.model_strategies:
        yield f"draft head: {_HEADS.get(settings.draft_head, f'folder {settings.draft_head}')}"


def _addresses(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    if settings.node_rank:
        yield f"node: {settings.node_rank} of {settings.nodes}, computes for {settings.leader}"
        return
    require_free("port", settings.host, settings.port)
    tls = "" if settings.tls_cert is None else ", TLS"
    mutual = "" if settings.tls_client_ca is None else " with client certificates"
    yield f"address: {settings.host}:{settings.port}{tls}{mutual}"


def _health(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    if settings.health_port is not None:
        require_free("health_port", settings.host, settings.health_port)
        yield f"health: {settings.host}:{settings.health_port}"


def _metrics(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    port, collector = settings.metrics_port, settings.otlp_endpoint
    if (port is not None or collector) and not all(map(find_spec, _METRICS)):
        raise MissingExtraError("--otlp-endpoint" if port is None else "--metrics-port", "telemetry")
    if port is not None:
        host = settings.metrics_host or settings.host
        require_free("metrics_port", host, port)
        yield f"metrics: {host}:{port}"
    if collector:
        yield f"collector: {collector}"


def _tls(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    require_pem(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    yield from ()


def _callers(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    if settings.auth_file is not None:
        content = auth_file.read(settings.auth_file)
        yield f"callers: {len(content.keys)} API keys, {len(content.certificates)} certificates"
    if settings.jwt_jwks is not None:
        if "://" not in settings.jwt_jwks:
            # Imported here: cryptography takes a while to import.
            from draftwood_service.auth.tokens import JwksFile

            JwksFile(Path(settings.jwt_jwks), settings.jwt_algorithms)
        yield f"callers: tokens of {settings.jwt_issuer} for {settings.jwt_audience}"
    if not settings.has_credentials:
        reach = "anyone who reaches the port" if settings.auth == "open" else "anyone on this machine"
        yield f"callers: {reach}, as operator"


def _store(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    check_files(settings.of_memory)
    if settings.store in ("memory", "embedded"):
        yield f"store: {settings.store}"
        return
    from draftwood_memory.store.redis_client import RedisClient

    yield f"store: {RedisClient(settings.store).description}"


def _tenants(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    if settings.tenants_file is not None:
        # Imported here: what reads the file brings most of the memory.
        from draftwood_tenants.file import read_file

        content = read_file(settings.tenants_file, settings.tenant_limits)
        yield f"tenants: {len(content.tenants)}, experiments: {len(content.experiments)}"


def _folders(settings: Settings, environ: Mapping[str, str]) -> Iterator[str]:
    require_writable("ready_file", settings.ready_file, keep=True)
    source = settings.compiled_functions
    if source is not None:
        if not environ.get("NUMBA_CACHE_DIR"):
            raise InvalidInputError("compiled_functions", source, "needs the environment variable NUMBA_CACHE_DIR")
        if not source.is_dir():
            raise InvalidInputError("compiled_functions", source, "no such folder")
    yield from ()


_LOOKS: tuple[Callable[[Settings, Mapping[str, str]], Iterator[str]], ...] = (
    *(_model, _drafters, _engine, _device, _addresses, _health, _metrics, _tls, _callers, _store, _tenants, _folders),
)
"""Each finds out something by itself, so that one that fails hides none of the others."""
