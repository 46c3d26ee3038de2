"""Audits of the real engine and the bundled model, over gRPC."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import AsyncClient
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.sampling import verification
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath
from draftwood_service.serving import ServedModel
from draftwood_service.settings import Settings
from draftwood_strategies.base import StepFeedback
from tests.model_runner.families import served
from tests.service.fakes import check_idle, started_server, until

QUESTIONS = read_questions()[0][:6]


async def test_answers_of_a_broken_verification_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an accepted draft, the least probable token is written. That audits of a sound engine find nothing is
    tested with the arms of experiments.
    """
    torch.set_num_threads(1)
    walk = verification.walk_row

    def wrong(sampler: TokenSampler, feedback: StepFeedback, logits: torch.Tensor, row: int) -> AcceptedPath:
        path = walk(sampler, feedback, logits, row)
        if path.nodes and not sampler.ended:
            path.token_ids[-1] = int(logits[feedback.of_row(row).start + path.nodes[-1] + 1].argmin())
        return path

    monkeypatch.setattr(TokenSampler, "follows_predictions", False)
    monkeypatch.setattr(verification, "walk_row", wrong)
    engines: list[Engine] = []

    def make_engine() -> Engine:
        engines.append(
            Engine(served("bundled"), EngineConfig(max_running=4, max_draft_nodes=32, adaptive_budget=False))
        )
        return engines[0]

    settings = Settings(port=0, max_draft_nodes=32, drain_grace=0.1, audit_share=1.0)
    server = await started_server(settings, ServedModel.of(served("bundled")), make_engine)
    try:
        async with AsyncClient(server.address, tenant="acme") as client:
            for number, question in enumerate(QUESTIONS):
                options = {"temperature": 1.0, "seed": number} if number % 2 else {}
                await client.generate(question, max_tokens=60, **options)  # type: ignore[arg-type]
                await check_idle(server.bridge, engines[0])  # an audit holds pages
        for _ in range(10):  # a slow machine takes longer than `until` waits
            with suppress(AssertionError):
                await until(lambda: sum(count.audited for count in server.audits.counts.values()) >= len(QUESTIONS) - 1)
                break
        [counts] = server.audits.counts.values()
        assert (counts.failed, counts.dropped) == (0, 0)
        assert counts.differing - counts.ties >= len(QUESTIONS) // 2
        assert {found.tenant for found in server.audits.differences} == {"acme"}
        assert counts.largest_margin > 0.1
    finally:
        await server.stop()
    await check_idle(server.bridge, engines[0])
