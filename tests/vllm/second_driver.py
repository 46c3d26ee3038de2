"""As `driver`, with vLLM's second model runner on the CPU: kernels are interpreted, drafts are those of `fake_trie`.

If `engine` has a `speculative_config`, which is then of vLLM's own drafter, and `drafts` is true, ours are beside it.
The build for CPUs has this runner, and no Triton for it. So Triton is told that it has a CPU, before vLLM looks.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(TRITON_INTERPRET="1", VLLM_CPU_CI_ENV="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.vllm import driver, fake_trie


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


class SecondDriver(driver.Driver):
    """The engine, whose worker has a speculator: ours, or vLLM's with ours beside it or not."""

    def __init__(self, engine: dict[str, Any], drafts: bool) -> None:
        beside = "speculative_config" in engine
        if beside and drafts:
            engine = {**engine, "additional_config": {"draftwood": True}}
        super().__init__(engine, drafts=drafts and not beside)
        if beside:
            interpret_log1p()
            import_module("vllm.v1.worker.gpu.spec_decode.speculator").gumbel_sample = drawn  # type: ignore[attr-defined]
        if beside and drafts:
            self.note_drafts()

    @property
    def ours(self) -> Any:
        """Our part of the speculator, which drafts alone or beside vLLM's."""
        return self.runner.speculator.propose.__self__

    @property
    def drafts(self) -> Any:
        return self.ours._opened.drafts

    def rows(self) -> dict[str, int]:
        return dict(self.runner.req_states.req_id_to_index)

    def note_drafts(self) -> None:
        memory = self.drafts
        take = memory.written

        def noted(names: list[str], written: torch.Tensor) -> None:
            for name, drafted in zip(names, written[:, -1].tolist(), strict=True):
                self.drafted[name] += drafted
            take(names, written)

        memory.written = noted

    def rests(self) -> bool:
        if len(self.drafts):
            return False
        self.drafts.take_in()
        memory = self.drafts.memory
        return memory.preloaded and not memory.counters().outbox_records

    def state(self) -> dict[str, Any]:
        self.wait_for_rest()
        counters = self.drafts.memory.counters()
        return {
            "sessions": len(self.drafts),
            "rows": len(self.ours._drafts),
            "learned": counters.learned,
            "waiting": counters.outbox_records,
            "off": self.ours._drafts is None,
            "asynchronous": bool(self.scheduler.vllm_config.scheduler_config.async_scheduling),
            "runner": type(self.runner).__mro__[1].__module__,
        }

    def break_ours(self) -> dict[str, Any]:
        """Our drafts raise in the next step."""
        self.ours._drafts._trie.propose_chains = None
        return {}

    def break_theirs(self) -> dict[str, Any]:
        """Their drafter raises in the next step."""
        self.runner.speculator.sample_draft = None
        return {}


def _schedule_asynchronously() -> None:
    """As vLLM does with this runner on devices, and not on the CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def asynchronous(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(asynchronous)


if __name__ == "__main__":
    import triton.backends

    backend: Any = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    triton.backends.backends["cpu"] = backend
    from draftwood_vllm import device_support, hosts

    hosts.on_cuda, hosts.device_bytes = (lambda: True), (lambda: 1 << 36)
    device_support.load = lambda: device_support.DeviceModule(fake_trie.DeviceSizes, fake_trie.DeviceTrie)
    _schedule_asynchronously()
    driver.main(SecondDriver)
