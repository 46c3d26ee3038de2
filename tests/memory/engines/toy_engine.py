"""An engine as vLLM's worker looks to a plug-in: rows that move, chunks of prompts, preemption. Its model is a rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from draftwood_memory.engines import exclusion
from draftwood_memory.engines.drafts import EngineDrafts
from draftwood_memory.engines.session import Row
from draftwood_strategies.draft_engine import controller as draft_account
from draftwood_strategies.draft_engine.online_step_times import OnlineStepTimes
from draftwood_strategies.draft_engine.step_times import StepSize

Model = Callable[[list[int]], int]
"""The next token of a text."""


def let_drafting_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of these engines takes microseconds, so that drafts would not pay.

    Nor do they end on a busy machine, where a thread may hold the other one up and a call may take long.
    """
    monkeypatch.setattr(exclusion, "STEP_WAIT", 20.0)
    monkeypatch.setattr(draft_account, "MAX_CALL_SECONDS", math.inf)
    monkeypatch.setattr(draft_account, "MIN_CREDIT_SECONDS", 1e9)
    monkeypatch.setattr(draft_account, "MAX_PAUSES", (0, 0))
    monkeypatch.setattr(draft_account, "TRIED_SHARE", 1e9)


class CheapTokens(OnlineStepTimes):
    """Wide steps cost little, as on a GPU, whatever the steps of these engines take."""

    def __init__(self) -> None:
        super().__init__()
        for rows in (1, 2, 4, 8, 16, 32):
            super().observe(StepSize(rows, rows), 1.0)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Steps of a rule, which say nothing."""

    def probes(self, sequences: int) -> bool:
        return False


def recitation(*texts: list[int]) -> Model:
    """A model that goes on with the text whose part the last three tokens are, and counts up elsewhere."""

    def following(tokens: list[int]) -> int:
        tail = tokens[-3:]
        for text in texts:
            for at in range(len(text) - 3):
                if text[at : at + 3] == tail:
                    return text[at + 3]
        return (tokens[-1] + 1) % 1000

    return following


@dataclass
class Running:
    """A request.

    Attributes:
        read: tokens of its prompt that were read.
        paused: preempted: known, and not in the batch.
    """

    request_id: str
    tokens: list[int]
    prompt: int
    most: int
    options: Mapping[str, Any]
    read: int = 0
    paused: bool = False
    draft: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :]


class ToyEngine:
    """Steps over its running requests, which `drafts` drafts for."""

    def __init__(self, model: Model, chunk: int = 1000, tenant: str = "") -> None:
        self.model = model
        self.chunk = chunk
        self.tenant = tenant
        self.requests: dict[str, Running] = {}
        self.finished: dict[str, Running] = {}
        self.drafts: EngineDrafts
        self.order: Callable[[list[Running]], list[Running]] = lambda running: running
        self.steps = 0

    def add(self, request_id: str, prompt: list[int], most: int = 24, **options: Any) -> None:
        self.requests[request_id] = Running(request_id, [*prompt], len(prompt), most, options)

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def step(self) -> None:
        running = self.order([request for request in self.requests.values() if not request.paused])
        if not running:
            return
        self.steps += 1
        rows = [self._row(one) for one in running]
        chains = self.drafts.step(rows)
        for row, one in enumerate(running):
            chain = chains[row].tokens.tolist()
            assert len(chain) <= 8
            one.draft = chain
            one.drafted += len(chain)
            if len(one.output) >= one.most:
                self.finished[one.request_id] = self.requests.pop(one.request_id)

    def run(self) -> None:
        while any(not request.paused for request in self.requests.values()):
            self.step()

    def _row(self, one: Running) -> Row:
        one.read = min(one.read + self.chunk, one.prompt)
        decodes = one.read == one.prompt
        if decodes:
            for token in [*one.draft, None]:
                right = self.model(one.tokens)
                one.tokens.append(right)
                one.accepted += right == token
                if right != token or len(one.output) >= one.most:
                    break
        max_draft_tokens = one.most - len(one.output) - 1
        return Row(one.request_id, np.array(one.tokens, np.int64), one.prompt, max_draft_tokens, one.options, decodes)


def plain(model: Model, prompt: list[int], most: int) -> list[int]:
    """What the model writes without drafts."""
    tokens = [*prompt]
    for _ in range(most):
        tokens.append(model(tokens))
    return tokens[len(prompt) :]
