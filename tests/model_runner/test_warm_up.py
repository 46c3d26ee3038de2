"""After the warm-up of an engine nothing is compiled in a request, and nothing of the warm-up stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import event

from draftwood_model_runner.engine import Engine, EngineConfig, warm_up
from draftwood_model_runner.loading.model import load_model
from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import create, strategy_names
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.registry import warm_up as warm_up_strategy


class _Compilations(event.Listener):
    def __init__(self) -> None:
        self.functions: list[str] = []

    def on_start(self, started: Any) -> None:
        self.functions.append(started.data["dispatcher"].py_func.__qualname__)

    def on_end(self, ended: Any) -> None: ...


def test_nothing_of_the_warm_up_stays() -> None:
    engine = Engine(load_model(runner="openvino"), EngineConfig(max_draft_nodes=16))
    warm_up(engine)
    assert not engine.has_work
    assert not engine.drafting_failures
    engine.check()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_compiled_in_a_request(tmp_path: Path) -> None:
    """In a process without compiled functions on disk, as after an installation."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", __name__], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.stdout.split() == ["compiled:"], ended.stderr


def _answer_and_print_what_is_compiled() -> None:
    engine = Engine(load_model(runner="openvino"), EngineConfig(max_draft_nodes=16))
    for name in strategy_names():
        warm_up_strategy(name)
    warm_up(engine)
    compilations = _Compilations()
    event.register("numba:compile", compilations)  # type: ignore[no-untyped-call]
    for i, name in enumerate(strategy_names()):
        prompt, stop = np.arange(5 + i, dtype=np.int32), StopParams(max_tokens=30, ignore_eos=True)
        request = Request(request_id=name, prompt=prompt, stop=stop, tenant="a", drafting=Drafting(name, max_nodes=16))
        engine.add(Sequence(request, create(name)))
    while engine.has_work:
        engine.step()
    print("compiled:", *compilations.functions)


if __name__ == "__main__":
    _answer_and_print_what_is_compiled()
