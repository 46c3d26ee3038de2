"""The service by `buf curl`, which knows it by reflection alone and speaks protobuf's JSON."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from draftwood_client.target import DEFAULT_TARGET
from tests.service.fakes import Served, serving

BUF = Path(sys.executable).with_name("buf")
README = Path(__file__).resolve().parents[3] / "README.md"
SERVICE = "draftwood.v1.GenerationService"

pytestmark = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed; it is among the dev requirements")


async def curl(served: Served, path: str, *arguments: str, reflection: str = "grpc-v1") -> tuple[str, str]:
    """Its stdout and stderr."""
    flags = ("--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", reflection)
    return await buf("curl", *flags, *arguments, f"http://{served.server.address}{path}")


async def buf(*arguments: str) -> tuple[str, str]:
    """Its stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        str(BUF), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return out.decode(), err.decode()


def messages(text: str) -> list[dict[str, Any]]:
    """JSON objects that follow each other."""
    objects, decoder = [], json.JSONDecoder()
    while text := text.strip():
        item, end = decoder.raw_decode(text)
        objects.append(item)
        text = text[end:]
    return objects


@pytest.mark.parametrize("reflection", ["grpc-v1", "grpc-v1alpha"])
async def test_reflection_has_both_of_its_names(reflection: str) -> None:
    async with serving() as served:
        out, err = await curl(served, "", "--list-methods", reflection=reflection)
        assert err == ""
        methods = {f"{SERVICE}/Generate", f"{SERVICE}/GenerateStream", "draftwood.v1.MemoryService/PurgeMemory"}
        assert methods <= set(out.split())


async def test_the_command_of_the_readme() -> None:
    [command] = re.findall(r"^buf (curl (?:.*\\\n)*.*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    async with serving() as served:
        assert DEFAULT_TARGET in command
        command = command.replace("\\\n", "").replace(DEFAULT_TARGET, served.server.address)
        out, err = await buf(*shlex.split(command))
        assert err == ""
        [whole] = messages(out)
        assert whole["usage"] == {"promptTokens": len("Dear customer,"), "completionTokens": 20}
        assert whole["answers"][0]["parts"] == [{"text": "abcdefghijklmnopqrst"}]


async def test_health_and_a_refusal() -> None:
    refused = {"text": "hi", "sampling": {"logitBias": {"999": 1}}}
    async with serving() as served:
        out, err = await curl(served, "/grpc.health.v1.Health/Check", "--data", json.dumps({"service": SERVICE}))
        assert (err, messages(out)) == ("", [{"status": "SERVING"}])
        out, err = await curl(served, f"/{SERVICE}/Generate", "--data", json.dumps(refused))
        assert (out, json.loads(err)["code"]) == ("", "invalid_argument")
        assert json.loads(err)["message"].startswith("sampling.logit_bias[999]")
