"""As `second_driver`, with a drafter of vLLM, and if `drafts` is true ours beside it."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.vllm import driver, second_driver


def interpret_log1p() -> None:
    """Triton's interpreter has no functions of CUDA's library, of which vLLM's kernels use this one."""
    from triton import language

    for name in ("sample.gumbel", "spec_decode.rejection_sampler_utils"):
        module: Any = import_module(f"vllm.v1.worker.gpu.{name}")
        if hasattr(module, "tldevice"):
            module.tldevice = SimpleNamespace(log1p=lambda x: language.log(1.0 + x))


def drawn(
    logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    *_: Any,
    logits_cache: torch.Tensor,
    logits_cache_col: torch.Tensor,
    **__: Any,
) -> torch.Tensor:
    """As vLLM's `gumbel_sample` for drafts, of which Triton's interpreter does not take a mask."""
    index = idx_mapping.long()
    logits_cache[index, logits_cache_col] = logits.to(logits_cache.dtype)
    chosen = temperature[index][:, None]
    noise = -torch.log(-torch.log(torch.rand_like(logits.float())))
    return torch.where(chosen > 0, logits / chosen.clamp(min=1e-5) + noise, logits).argmax(-1)


class BesideDriver(second_driver.SecondDriver):
    """The engine, whose worker has a speculator of vLLM."""

    def __init__(self, engine: dict[str, Any], drafts: bool) -> None:
        option = {"additional_config": {"draftwood": True}} if drafts else {}
        driver.Driver.__init__(self, {**engine, **option}, drafts=False)
        interpret_log1p()
        import_module("vllm.v1.worker.gpu.spec_decode.speculator").gumbel_sample = drawn  # type: ignore[attr-defined]
        if drafts:
            self.note_drafts()

    def note_drafts(self) -> None:
        """Counts in `drafted` the tokens of ours that are verified."""
        choose = self.ours._drafts.choose

        def noted(indexes: Any, *given: Any) -> Any:
            chosen = choose(indexes, *given)
            names = {state: name for name, state in self.rows().items()}
            for state, taken in zip(indexes.tolist(), chosen.ours.tolist(), strict=True):
                self.drafted[names[state]] += taken
            return chosen

        self.ours._drafts.choose = noted

    def break_ours(self) -> dict[str, Any]:
        """Our drafts raise in the next step."""
        self.ours._drafts._trie.propose_chains = None
        return {}

    def break_theirs(self) -> dict[str, Any]:
        """Their drafter raises in the next step."""
        self.runner.speculator.sample_draft = None
        return {}


if __name__ == "__main__":
    second_driver.main(BesideDriver)
