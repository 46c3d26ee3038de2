"""As `driver`, with vLLM's second model runner on the CPU: kernels are interpreted, drafts are those of `fake_trie`.

The build for CPUs has this runner, and no Triton for it. So Triton is told that it has a CPU, before vLLM looks.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(TRITON_INTERPRET="1", VLLM_CPU_CI_ENV="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.vllm import driver, fake_trie


class SecondDriver(driver.Driver):
    """The engine, whose worker has a speculator."""

    def rows(self) -> dict[str, int]:
        return dict(self.runner.req_states.req_id_to_index)

    @property
    def ours(self) -> Any:
        """Our part of the speculator, which drafts alone or beside vLLM's."""
        return self.runner.speculator.propose.__self__

    def note_drafts(self) -> None:
        speculator = self.ours
        propose = speculator._drafts.propose

        def noted(*args: Any) -> Any:
            step = propose(*args)
            names = {joined.state: name for name, joined in speculator._drafts._live.items()}
            for state, drafted in zip(args[0].tolist(), step.written[:, -1].tolist(), strict=True):
                if state in names:
                    self.drafted[names[state]] += drafted
            return step

        speculator._drafts.propose = noted

    def state(self, rest: float = 5.0) -> dict[str, Any]:
        speculator = self.ours
        memory, deadline = speculator._opened.drafts, time.monotonic() + rest
        while time.monotonic() < deadline and (len(memory) or memory.memory.counters().outbox_records):
            time.sleep(0.02)
        time.sleep(0.2)  # the last answers are taken in
        counters = memory.memory.counters()
        return {
            "sessions": len(memory),
            "rows": len(speculator._drafts),
            "learned": counters.learned,
            "waiting": counters.outbox_records,
            "off": speculator._drafts is None,
            "asynchronous": bool(self.scheduler.vllm_config.scheduler_config.async_scheduling),
            "runner": type(self.runner).__mro__[1].__module__,
        }


def _schedule_asynchronously() -> None:
    """As vLLM does with this runner on devices, and not on the CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def asynchronous(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(asynchronous)


def main(driver_class: type[SecondDriver] = SecondDriver) -> None:
    import triton.backends

    backend: Any = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    triton.backends.backends["cpu"] = backend
    from draftwood_vllm import device_support, hosts

    hosts.on_cuda, hosts.device_bytes = (lambda: True), (lambda: 1 << 36)
    device_support.load = lambda: device_support.DeviceModule(fake_trie.DeviceSizes, fake_trie.DeviceTrie)
    _schedule_asynchronously()
    driver.main(driver_class)


if __name__ == "__main__":
    main()
