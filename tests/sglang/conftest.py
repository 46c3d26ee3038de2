"""Lets SGLang's code be imported on a machine without a GPU, in each process of the tests.

What is replaced needs a device: the kernels of `sgl_kernel`, whose package consists of CUDA libraries, and torchvision,
whose build there is one for CUDA. The kernel that reconstructs trees from masks is computed by SGLang's own one in
Triton, interpreted, which it has for devices without the compiled one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")


class _Absent(types.ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Absences(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        absent = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = _Absent(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _reconstruct(*arguments: Any) -> None:
    from sglang.kernels.ops.speculative import reconstruct_tree

    tree_mask, seq_lens, positions, index, next_token, next_sibling, bs, nodes = arguments
    reconstruct_tree._reconstruct_tree_mask_kernel[(bs,)](
        tree_mask,
        seq_lens,
        positions,
        index,
        next_token,
        next_sibling,
        n=nodes,
        BLOCK_N=reconstruct_tree.next_power_of_2(nodes),
    )


def _allow_import() -> None:
    import transformers.image_utils  # noqa: F401  # sees that torchvision is absent

    sys.meta_path.insert(0, _Absences())
    kernels, speculative = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.speculative")
    kernels.__path__ = []
    speculative.reconstruct_indices_from_tree_mask = _reconstruct  # type: ignore[attr-defined]
    sys.modules.update({"sgl_kernel": kernels, "sgl_kernel.speculative": speculative})


def _let_drafting_pay() -> None:
    """Steps of these tests take no time of a model."""
    from draftwood_strategies.draft_engine import controller

    controller.MIN_CREDIT_SECONDS = controller.TRIED_SHARE = 1e9
    controller.MAX_PAUSES = 0, 0


if find_spec("sglang") is not None:
    _allow_import()
    _let_drafting_pay()
