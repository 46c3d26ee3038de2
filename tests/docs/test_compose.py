"""The compose file of examples/compose: its commands are ours, and what its services need is in it."""

from __future__ import annotations

from typing import Any

import pytest
import typer
import yaml

from draftwood_client.cli import build_app
from draftwood_service.gateway.command import app as gateway_app
from draftwood_service.settings import Settings
from tests.docs.pages import ROOT

FILE: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "compose" / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = FILE["services"]


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_server_has_settings_that_exist(name: str) -> None:
    program, *words = SERVICES[name]["command"]
    values = dict(zip(words[::2], words[1::2], strict=True))
    settings = Settings.model_validate({flag.removeprefix("--").replace("-", "_"): one for flag, one in values.items()})
    environment = SERVICES[name]["environment"]
    known = {f"DRAFTWOOD_{field.upper()}" for field in Settings.model_fields}
    assert program == "serve"
    assert settings.auth == "open"
    assert set(environment) <= known
    assert environment["DRAFTWOOD_STORE"] == "redis://store:6379"
    assert SERVICES[name]["healthcheck"]["test"][1:3] == ["draftwood", "info"]
    assert typer.main.get_command(build_app()).commands["info"]  # type: ignore[attr-defined]


def test_the_gateway_has_options_that_exist() -> None:
    program, *words = SERVICES["gateway"]["command"]
    assert program == "gateway"
    typer.main.get_command(gateway_app).make_context("gateway", words)


def test_what_is_named_is_in_the_file() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)
        named = {volume.partition(":")[0] for volume in service.get("volumes", ())}
        assert named <= set(FILE["volumes"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
