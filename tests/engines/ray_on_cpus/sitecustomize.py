"""Of processes with this folder in PYTHONPATH: vLLM's CPU build runs over Ray, with GPUs of Ray's that are none.

vLLM's CPU platform names no resource of Ray's, without which its executor for Ray does not start. The rest is as vLLM
has it.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_PLATFORM = "vllm.platforms.cpu"


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _PLATFORM:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_name(module: Any) -> None:
            run(module)
            module.CpuPlatform.ray_device_key = "GPU"

        loader.exec_module = run_and_name
        return spec


sys.meta_path.insert(0, _Finder())
