"""A gateway in front of an engine that follows a script, and the official client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from openai import AsyncOpenAI

from draftwood_service.tools import ToolFormat
from tests.service.fakes import ByteTokenizer, FakeEngine, FakeModel, scripted, serving
from tests.service.gateway.listening import Listening, listening

FORM = ToolFormat("<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n", "name", "arguments")
PARAMETERS = {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]}
CALL = '<tool_call>\n{"name": "track", "arguments": {"order": 7}}\n</tool_call>'
SCRIPT = f"<think>\nHm.\n</think>\n\nSure.\n{CALL}\n{CALL.replace('7', '8')}"


@dataclass(frozen=True)
class Asked:
    gateway: Listening
    client: AsyncOpenAI
    engine: FakeEngine
    tokenizer: ByteTokenizer


@asynccontextmanager
async def asking(script: str = SCRIPT, model: FakeModel | None = None) -> AsyncIterator[Asked]:
    """`model`: another one than that of the script."""
    engine, usual = scripted(script, FORM)
    model = usual if model is None else model
    model.tokenizer.template_variables = frozenset({"enable_thinking"})
    async with (
        serving(engine, model) as served,
        listening(served.server.address) as gateway,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield Asked(gateway, client, engine, model.tokenizer)
