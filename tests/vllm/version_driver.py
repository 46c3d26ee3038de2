"""Drives the second runner's own classes of a version of vLLM, on CPU tensors, and prints one JSON object: of our
drafts alone; of ours beside the version's class for EAGLE-3, which drafts what is said here; and how often its own
rejection sampler writes each token after drafts of both kinds. "BESIDE" is logged before the second part.

The folder of the version is first on the path; libraries are those of the build for CPUs. Its kernels are interpreted.
The runner is made without a model: what it samples is said here, and goes through its own state.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

# Triton is taken as if a device were to come later.
os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

from tests.vllm.second_driver import interpret_log1p

ROWS, LONGEST = 4, 4
SPECULATION = {"method": "custom_class", "model": "draftwood_vllm.Proposer", "num_speculative_tokens": LONGEST}
CYCLE = [5, 6, 7, 8, 9]
WRONG = [1, 2, 3, 4]
REQUESTS, PLACES = 200, 2
TARGET = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
"""What a model's tokens are, in two places."""
DRAWN = torch.tensor([0.1, 0.1, 0.4, 0.4])
"""What a drafter draws in each of them."""
OURS = [0, 3]


def prepared() -> None:
    """A platform that has no device, and drafts for it."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.check_and_update_config = classmethod(lambda cls, vllm_config: None)
    platforms._current_platform = CpuPlatform()
    import_module("vllm.v1.worker.cpu.shm")  # in the place of torch's functions for devices

    from draftwood_vllm import device_support, hosts, proposer
    from tests.vllm import fake_trie

    hosts.on_cuda = lambda: True
    device_support.load = lambda: device_support.DeviceModule(fake_trie.DeviceSizes, fake_trie.DeviceTrie)
    hosts.device_bytes = lambda: 1 << 36
    proposer.check()


def configured(model: str, speculation: dict[str, Any] = SPECULATION, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    limits: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": ROWS, "enforce_eager": True, **options}
    return EngineArgs(model=model, dtype="float32", speculative_config=speculation, **limits).create_engine_config()


def runner_of(config: Any) -> Any:
    """vLLM's model runner without a model, with its own state and our speculator."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.states import RequestState

    speculator: Any = import_module("draftwood_vllm.speculator")
    speculator.get_tp_group = lambda: SimpleNamespace(world_size=1)
    made = model_runner.GPUModelRunner.__new__(model_runner.GPUModelRunner)
    for name in ("model_state", "block_tables", "lora_state", "sampler", "prompt_logprobs_worker"):
        setattr(made, name, MagicMock())
    for name in ("encoder_cache", "pooling_runner", "pp_handler", "adaptive_verification", "speculator"):
        setattr(made, name, None)
    made.is_last_pp_rank, made.model_memory_usage = True, 0
    made.req_states = RequestState(ROWS, 64, 64, LONGEST, 32000, torch.device("cpu"))
    made.load_model = lambda: None
    factory = model_runner.init_speculator
    states = [made.req_states] if "req_states" in inspect.signature(factory).parameters else []
    made.speculator = factory(config, torch.device("cpu"), *states)
    made.load_model()
    return made


class Steps:
    """Steps of a runner, whose model goes round in `CYCLE`."""

    def __init__(self, runner: Any) -> None:
        from vllm.v1.worker.gpu.input_batch import InputBuffers

        self.runner = runner
        self.buffers = InputBuffers(ROWS, 64, torch.device("cpu"))
        self.drafts: dict[str, list[int]] = {}

    def step(self, new: dict[str, list[int]], finished: set[str] = frozenset()) -> list[int]:  # type: ignore[assignment]
        """What the requests accept of their drafts; they write one token more."""
        from vllm.v1.core.sched.output import SchedulerOutput
        from vllm.v1.worker.gpu.input_batch import InputBatch, post_update

        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(finished)
        output.scheduled_new_reqs = [self._request(name, prompt) for name, prompt in new.items()]
        self.runner.finish_requests(output)
        self.runner.add_requests(output)
        states = self.runner.req_states
        names = [*states.req_id_to_index]
        if not names:
            return []
        indexes = torch.tensor([states.req_id_to_index[name] for name in names])
        sampled = torch.zeros((len(names), LONGEST + 1), dtype=torch.int64)
        counts = torch.zeros(len(names), dtype=torch.int32)
        for i, name in enumerate(names):
            index = int(indexes[i])
            last = int(states.all_token_ids.gpu[index, int(states.total_len.gpu[index]) - 1])
            answer = [CYCLE[(CYCLE.index(last) + 1 + place) % 5] for place in range(LONGEST + 1)]
            draft = self.drafts.get(name, [])
            accepted = next((at for at, token in enumerate(draft) if token != answer[at]), len(draft))
            sampled[i], counts[i] = torch.tensor(answer), accepted + 1
        batch = InputBatch.make_dummy(len(names), len(names), self.buffers)
        batch.req_ids, batch.idx_mapping = names, indexes.to(batch.idx_mapping.dtype)
        rejected = torch.tensor([len(self.drafts.get(name, [])) for name in names], dtype=torch.int32) - counts + 1
        post_update(
            batch.idx_mapping,
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            None,
            sampled,
            counts,
            rejected.clamp(min=0),
            None,
            states.all_token_ids.gpu,
            states.total_len.gpu,
            *self._drafts_of(post_update, states),
        )
        nothing, temperatures = [None] * 4, torch.zeros(ROWS)
        given = counts, rejected, states.last_sampled_tokens, None, temperatures, None
        drafts = self.runner.speculator.propose(batch, *nothing, *given, mm_inputs=None)
        states.draft_tokens[indexes] = drafts
        self.drafts = dict(zip(names, drafts.tolist(), strict=True))
        return (counts - 1).tolist()

    @staticmethod
    def _drafts_of(post_update: Any, states: Any) -> list[Any]:
        return [None, states.draft_tokens] if "draft_tokens" in inspect.signature(post_update).parameters else []

    @staticmethod
    def _request(name: str, prompt: list[int]) -> Any:
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        params = SamplingParams(max_tokens=20, extra_args={"draftwood_tenant": name[0]})
        return NewRequestData(
            req_id=name,
            prompt_token_ids=prompt,
            prefill_token_ids=prompt,
            mm_features=[],
            sampling_params=params,
            pooling_params=None,
            block_ids=([],),
            num_computed_tokens=0,
            lora_request=None,
        )


def drafted_alone(model: str) -> dict[str, Any]:
    """What requests accept of ours, and what is learned."""
    config = configured(model)
    runner = runner_of(config)
    steps = Steps(runner)
    accepted = [steps.step({"a1": CYCLE, "b1": [5]})]
    accepted += [steps.step({}) for _ in range(3)]
    memory = runner.speculator._opened.drafts
    steps.step({"a2": [9], "c1": [9]}, {"a1", "b1"})
    of_tenant = steps.step({})
    steps.step({}, {"a2", "c1"})
    memory.take_in()
    found = {
        "runner": config.use_v2_model_runner,
        "asynchronous": config.scheduler_config.async_scheduling,
        "accepted": accepted,
        "of the tenant": of_tenant,
        "learned": memory.memory.counters().learned,
        "off": runner.speculator._drafts is None,
    }
    runner.speculator._opened.close()
    return found


def drafted_beside(model: str, head: str) -> dict[str, Any]:
    """What requests accept while theirs is wrong, and what a failure of ours leaves."""
    eagle: Any = import_module("vllm.v1.worker.gpu.spec_decode.eagle.speculator")
    base: Any = import_module("vllm.v1.worker.gpu.spec_decode.speculator")

    class Drafter(eagle.EagleSpeculator):  # type: ignore[misc]
        def propose(self, input_batch: Any, *_: Any, **__: Any) -> torch.Tensor:
            return torch.tensor(WRONG).repeat(input_batch.num_reqs, 1)

    eagle.EagleSpeculator = Drafter
    speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": LONGEST}
    config = configured(model, speculation, additional_config={"draftwood": True})
    runner = runner_of(config)
    steps = Steps(runner)
    ours = runner.speculator.propose.__self__
    accepted = [steps.step({"a1": CYCLE, "b1": [5]})]
    accepted += [steps.step({}) for _ in range(2)]
    ours._drafts._trie.propose_chains = None
    steps.step({})
    return {
        "runner": config.use_v2_model_runner,
        "theirs": isinstance(runner.speculator, base.DraftModelSpeculator),
        "accepted": accepted,
        "after": steps.drafts["a1"],
        "off": ours._drafts is None,
    }


def sampled() -> dict[int, list[list[int]]]:
    """How often each token is written by requests that verify ours, theirs, and one token of ours before theirs."""
    beside: Any = import_module("draftwood_vllm.beside")
    sampler: Any = import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
    random = torch.Generator().manual_seed(3)
    vocabulary, rows = TARGET.shape[1], 3 * REQUESTS
    logits = DRAWN.log().expand(rows, PLACES, vocabulary).clone()
    theirs = torch.multinomial(DRAWN.expand(rows * PLACES, -1), 1, generator=random).view(rows, PLACES)
    counts = torch.arange(3, dtype=torch.int32).repeat_interleave(REQUESTS)
    tokens = torch.where(torch.arange(PLACES) < counts[:, None], torch.tensor(OURS), theirs)
    index = torch.arange(rows, dtype=torch.int32)
    beside.OneHot(logits).mark(index, tokens, counts)
    each = PLACES + 1
    target = torch.cat([TARGET, TARGET[:1]]).log().repeat(rows, 1)
    written, lengths = sampler.rejection_sample(
        target,
        logits,
        torch.cat([torch.zeros(rows, 1, dtype=torch.int64), tokens], 1).reshape(-1).to(torch.int32),
        torch.arange(rows + 1, dtype=torch.int32) * each,
        torch.arange(each).repeat(rows) + 7,
        index,
        index.repeat_interleave(each),
        torch.arange(each, dtype=torch.int32).repeat(rows),
        torch.ones(rows),
        torch.arange(rows) * 7919 + 1,
        PLACES,
    )
    found = {}
    for kind in range(3):
        mine = counts == kind
        first = torch.bincount(written[mine, 0], minlength=vocabulary)
        second = torch.bincount(written[mine & (lengths > 1), 1], minlength=vocabulary)
        found[kind] = [first.tolist(), second.tolist()]
    return found


if __name__ == "__main__":
    model, head = sys.argv[1:]
    prepared()
    interpret_log1p()
    alone = drafted_alone(model)
    for stream in (sys.stdout, sys.stderr):
        print("BESIDE", file=stream, flush=True)
    print(json.dumps({"alone": alone, "beside": drafted_beside(model, head), "sampled": sampled()}))
