"""As `version_driver`, with the version's own class for EAGLE-3, which drafts what is said here, and ours beside it.

Then its own rejection sampler verifies drafts of both kinds, and its samples are counted."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

from tests.vllm import version_driver
from tests.vllm.beside_driver import interpret_log1p
from tests.vllm.version_driver import CYCLE, LONGEST, Steps

WRONG = [1, 2, 3, 4]
REQUESTS, PLACES = 200, 2
TARGET = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
"""What a model's tokens are, in two places."""
DRAWN = torch.tensor([0.1, 0.1, 0.4, 0.4])
"""What a drafter draws in each of them."""
OURS = [0, 3]


def drafted_beside(model: str, head: str) -> dict[str, Any]:
    """What requests accept while theirs is wrong, and what a failure of ours leaves."""
    eagle: Any = import_module("vllm.v1.worker.gpu.spec_decode.eagle.speculator")
    base: Any = import_module("vllm.v1.worker.gpu.spec_decode.speculator")

    class Drafter(eagle.EagleSpeculator):  # type: ignore[misc]
        def propose(self, input_batch: Any, *_: Any, **__: Any) -> torch.Tensor:
            return torch.tensor(WRONG).repeat(input_batch.num_reqs, 1)

    eagle.EagleSpeculator = Drafter
    speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": LONGEST}
    config = version_driver.configured(model, speculation, additional_config={"draftwood": True})
    runner = version_driver.runner_of(config)
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
    version_driver.prepared()
    interpret_log1p()
    print(json.dumps({**drafted_beside(*sys.argv[1:]), "sampled": sampled()}))
