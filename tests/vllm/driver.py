"""A vLLM engine in a process of its own, in vLLM's environment: one JSON object per line in, one out.

| request | answer |
|---|---|
| `{"op": "load", "engine": {...}, "drafts"}` | `{"version"}` |
| `{"op": "run", "requests": [...], "aborts": {ID: STEP}}` | `{"outputs", "steps", "preemptions", "rows_moved", ...}` |

`engine` has arguments of `EngineArgs`. A request is `{"id", "prompt", "at", "params"}`: token ids, the step in which it is
added, and arguments of `SamplingParams`. Imports nothing of the tests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


class Driver:
    """The engine, its worker in this process."""

    def __init__(self, engine: dict[str, Any], drafts: bool) -> None:
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        speculation = {"method": "custom_class", "model": "draftwood_vllm.Proposer", "num_speculative_tokens": 8}
        arguments = {**engine, **({"speculative_config": speculation} if drafts else {})}
        self.version = vllm.__version__
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        core: Any = self.engine.engine_core
        self.core = core.engine_core
        self.runner = self.core.model_executor.driver_worker.worker.model_runner

    def run(self, requests: list[dict[str, Any]], aborts: dict[str, int], rest: float = 0.0) -> dict[str, Any]:
        """Runs requests to their ends."""
        from vllm import SamplingParams

        waiting = sorted(requests, key=lambda one: one["at"])
        outputs: dict[str, list[list[int]]] = {}
        moved = preemptions = steps = drafted = accepted = 0
        rows: dict[str, int] = {}
        scheduler = self.core.scheduler
        while waiting or self.engine.has_unfinished_requests():
            while waiting and (waiting[0]["at"] <= steps or not self.engine.has_unfinished_requests()):
                one = waiting.pop(0)
                params = SamplingParams(temperature=0.0, **one["params"]) if "temperature" not in one["params"] else (
                    SamplingParams(**one["params"])
                )  # fmt: skip
                self.engine.add_request(one["id"], {"prompt_token_ids": one["prompt"]}, params)
            gone = [name for name, step in aborts.items() if step == steps]
            if gone:
                self.engine.abort_request(gone)
            for output in self.engine.step():
                if output.finished:
                    outputs[output.request_id] = [[*each.token_ids] for each in output.outputs]
            steps += 1
            preemptions += sum(request.num_preemptions > 0 for request in scheduler.waiting)
            now = dict(self.runner.input_batch.req_id_to_index)
            moved += sum(rows[name] != row for name, row in now.items() if name in rows)
            rows = now
        found = self._sessions(rest)
        for stats in found.pop("statistics"):
            drafted, accepted = drafted + stats[0], accepted + stats[1]
        return {
            "outputs": outputs,
            "steps": steps,
            "preemptions": preemptions,
            "rows_moved": moved,
            **found,
        }

    def _sessions(self, rest: float) -> dict[str, Any]:
        drafter = getattr(self.runner, "drafter", None)
        opened = getattr(drafter, "_opened", None)
        if opened is None:
            return {"statistics": [], "on": False}
        deadline = time.monotonic() + rest
        while opened.drafts.sessions and time.monotonic() < deadline:
            time.sleep(0.02)
        counters = opened.drafts._memory.counters()
        return {
            "statistics": [],
            "on": True,
            "sessions": len(opened.drafts.sessions),
            "learned": counters.learned,
            "waiting": counters.outbox_records,
            "fingerprint": opened.drafts._memory.naming.fingerprint,
            "failures": dict(opened.drafts.failures),
        }


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr
    driver: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        try:
            if operation == "load":
                driver = Driver(**request)
                answer: dict[str, Any] = {"version": driver.version}
            else:
                answer = driver.run(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
