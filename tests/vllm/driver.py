"""A vLLM engine in a process of its own, in vLLM's environment: one JSON object per line in, one out.

| request | answer |
|---|---|
| `{"op": "load", "engine", "drafts"}` | `{"version"}` |
| `{"op": "run", "requests", "aborts"}` | `{"outputs", "steps", "preemptions", "rows_moved", "cached", "drafted"}` |
| `{"op": "crash"}` | `{}`, once the thread of the memory is dead |
| `{"op": "state"}` | `{"sessions", "learned", "waiting", "failures", "off"}`, once it rests |

`engine` has arguments of `EngineArgs`. A request is `{"id", "prompt", "at", "params"}`: token ids, the step in which it
is added, and arguments of `SamplingParams`; `aborts` has the step of each id, and `outputs` and `drafted` are by id.
Imports nothing of the tests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


class Driver:
    """The engine, with its worker in this process."""

    def __init__(self, engine: dict[str, Any], drafts: bool) -> None:
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        speculation = {"method": "custom_class", "model": "draftwood_vllm.Proposer", "num_speculative_tokens": 8}
        arguments = {**engine, **({"speculative_config": speculation} if drafts else {})}
        self.version = vllm.__version__
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        core: Any = self.engine.engine_core
        self.scheduler = core.engine_core.scheduler
        self.runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        self.drafted: Counter[str] = Counter()
        if drafts:
            let_drafting_pay()
            self.note_drafts()

    def rows(self) -> dict[str, int]:
        """Of the requests in the runner."""
        return dict(self.runner.input_batch.req_id_to_index)

    @property
    def drafts(self) -> Any:
        return self.runner.drafter._opened.drafts

    def note_drafts(self) -> None:
        """Counts in `drafted` how many tokens are drafted for each request."""
        drafts = self.drafts
        step = drafts.step

        def noted(rows: Any) -> Any:
            chains = step(rows)
            for row, chain in zip(rows, chains, strict=True):
                self.drafted[row.request_id] += len(chain)
            return chains

        drafts.step = noted

    def run(self, requests: list[dict[str, Any]], aborts: dict[str, int]) -> dict[str, Any]:
        """Runs requests to their ends."""
        waiting = sorted(requests, key=lambda request: int(request["at"]))
        outputs: dict[str, list[list[int]]] = {}
        moved = steps = cached = 0
        preempted: set[str] = set()
        rows: dict[str, int] = {}
        self.drafted.clear()
        while waiting or self.engine.has_unfinished_requests():
            while waiting and (waiting[0]["at"] <= steps or not self.engine.has_unfinished_requests()):
                self._add(waiting.pop(0))
            if gone := [name for name, step in aborts.items() if step == steps]:
                self.engine.abort_request(gone)
            for output in self.engine.step():
                cached += output.num_cached_tokens or 0
                if output.finished:
                    outputs[output.request_id] = [[*each.token_ids] for each in output.outputs]
            steps += 1
            preempted |= {one.request_id for one in self.scheduler.waiting if one.num_preemptions}
            now = self.rows()
            moved += sum(rows[name] != row for name, row in now.items() if name in rows)
            rows = now
        self.engine.step()  # tells the worker of the last ones' end, as vLLM's own loop does
        counts = {"steps": steps, "preemptions": len(preempted), "rows_moved": moved, "cached": cached}
        by_id = Counter[str]()
        for name, drafted in self.drafted.items():
            by_id[name.rpartition("-")[0] or name] += drafted  # vLLM adds a random suffix
        return {"outputs": outputs, "drafted": by_id, **counts}

    def rests(self) -> bool:
        """All requests have ended, what they wrote is stored, and memories that they asked for are there."""
        drafts = self.drafts
        with drafts._exclusion.held():
            if drafts.sessions or drafts.sessions.has_tasks:
                return False
        return drafts.memory.preloaded and not drafts.memory.counters().outbox_records

    def wait_for_rest(self) -> None:
        deadline = time.monotonic() + 30.0
        while not self.rests() and time.monotonic() < deadline:
            time.sleep(0.02)

    def state(self) -> dict[str, Any]:
        self.wait_for_rest()
        counters = self.drafts.memory.counters()
        return {
            "sessions": len(self.drafts.sessions),
            "learned": counters.learned,
            "waiting": counters.outbox_records,
            "failures": dict(self.drafts.failures),
            "off": self.runner.drafter._off,
        }

    def crash(self) -> dict[str, Any]:
        """Ends the loop of the thread that follows the memories, in its midst."""
        thread = self.drafts.memory.thread
        thread._loop.call_soon_threadsafe(thread._loop.stop)
        thread._thread.join(30.0)
        return {} if not thread._thread.is_alive() else {"error": "it lives"}

    def _add(self, one: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        given = {"temperature": 0.0, "output_kind": RequestOutputKind.FINAL_ONLY, **one["params"]}
        if "regex" in given:
            given["structured_outputs"] = StructuredOutputsParams(regex=given.pop("regex"))
        self.engine.add_request(one["id"], {"prompt_token_ids": one["prompt"]}, SamplingParams(**given))


def let_drafting_pay() -> None:
    """Whatever drafts, and steps of any size, take on a machine that others use as well."""
    from draftwood_strategies.draft_engine import controller
    from draftwood_strategies.draft_engine.online_step_times import OnlineStepTimes

    controller.MIN_CREDIT_SECONDS = controller.TRIED_SHARE = 1e9
    controller.MAX_PAUSES = 0, 0
    observe = OnlineStepTimes.observe
    OnlineStepTimes.observe = lambda self, size, seconds: observe(self, size, 1.0)  # type: ignore[method-assign]


def main(driver_class: type[Driver] = Driver) -> None:
    """Answers requests until there are no more."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    driver: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            if operation == "load":
                driver = driver_class(**request)
                answer: dict[str, Any] = {"version": driver.version}
            else:
                answer = getattr(driver, operation)(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
