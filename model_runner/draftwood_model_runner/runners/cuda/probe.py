"""Checks that draft trees can be verified on a model by the kernels for GPUs, and takes the model over."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.attention_shapes import attention_shapes
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.exact_linear import make_exact
from draftwood_model_runner.runners.cuda.fusing.model import fuse
from draftwood_model_runner.runners.cuda.kv_cache import PAGE_SIZE
from draftwood_model_runner.runners.cuda.runner import CudaLayout, CudaRunner
from draftwood_model_runner.runners.cuda.steps import exact_tiling
from draftwood_model_runner.runners.cuda.steps.attention import ATTENTION_NAME, register
from draftwood_model_runner.runners.probing import (
    TOLERANCE,
    difference,
    does_not_run,
    other_layers,
    past_thresholds,
    path_with_wrong_siblings,
    same_bits,
)
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_strategies.draft import EMPTY_TREE, Int32Array

_CONTEXT, _LONG_CONTEXT, _PATH = PAGE_SIZE - 3, 6 * PAGE_SIZE - 3, 5
"""Tokens of the prompt, of that of a small copy, and of the true path, which crosses the end of a page."""


@torch.inference_mode()
def probe(module: Any, max_context: int, exact: bool) -> CudaLayout:
    """Puts paged attention and fused operations into a model; returns the shape of its keys and values.

    As `runners.torch.probe`: the logits along the true path of a small tree must be those of the unmodified model.

    Args:
        exact: put exact attention and linear layers into it; logits must be bit-identical with and without drafts.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name, config = type(module).__name__, module.config.get_text_config()
    if reason := other_layers(config, max_context):
        raise UnsupportedModelError(f"{name}: {reason}")
    if module.device.type == "cuda":
        torch.cuda.set_device(module.device)  # where Triton launches kernels
    register()
    layout = _layout(module, max_context, exact)
    past_thresholds(
        module,
        max_context,
        lambda copied: _compare(
            copied.to(module.device), _layout(copied.to(module.device), CONTEXT, exact), _LONG_CONTEXT
        ),
    )
    _compare(module, layout, _CONTEXT)
    if exact and not _is_exact(module, layout, max_context):
        raise UnsupportedModelError(f"{name}: in exact mode the bits of its logits still depend on the batch")
    return layout


def _layout(module: Any, max_context: int, exact: bool) -> CudaLayout:
    shapes, group, dtype = attention_shapes(module, max_context)
    return CudaLayout(shapes, group, dtype, module.device, exact)


def _is_exact(module: Any, layout: CudaLayout, max_context: int) -> bool:
    vocab = module.config.get_text_config().vocab_size
    length = min(exact_tiling.RUN - 2, max_context - _PATH - 1)  # the true path crosses the end of a run
    tokens = np.random.default_rng(1).integers(0, vocab, length + _PATH, np.int32)
    runner = CudaRunner(module, layout, 2 * (length + 4 * PAGE_SIZE), graphs=False)
    return same_bits(lambda batch: runner.step(batch, 0).logits, runner.pages, tokens[:length], tokens[length:], vocab)


def _compare(module: Any, layout: CudaLayout, context: int) -> None:
    name, vocab = type(module).__name__, module.config.get_text_config().vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, context + _PATH, np.int32)
    ids = torch.from_numpy(tokens.astype(np.int64)).to(module.device)[None]
    try:
        module.set_attn_implementation("eager")
        plain = module(input_ids=ids, use_cache=False).logits[0, context - 1 :]
        module.set_attn_implementation(ATTENTION_NAME)
        fuse(module, layout.exact)
        if layout.exact:
            make_exact(module)
        logits = _tree_logits(module, layout, tokens, vocab)
    except Exception as error:
        raise UnsupportedModelError(does_not_run(name, error)) from error
    differing, tolerance = difference(logits, plain), TOLERANCE[module.dtype]
    if not differing <= tolerance:
        raise UnsupportedModelError(
            f"{name}: logits over a draft tree differ from the model's own by {differing:.1e} (at most"
            f" {tolerance:.0e} is rounding), so it computes something beside attention that depends on the other tokens"
            " of a step, or positions of its own"
        )


def _tree_logits(module: Any, layout: CudaLayout, tokens: Int32Array, vocab: int) -> torch.Tensor:
    """Logits [1 + path, vocab] along the true path of a tree, under a token that needs no logits, its context committed
    before in two steps; in pages that are no neighbours."""
    context = tokens.size - _PATH
    runner = CudaRunner(module, layout, context + 2 * _PATH, graphs=False)
    pages, half = np.arange(runner.pages, dtype=np.int32)[::-1].copy(), context // 2

    def logits(batch: StepBatch) -> torch.Tensor:
        predicted: torch.Tensor = runner.step(batch, 0).logits
        return predicted

    for start, end in ((0, half), (half, context - 2)):
        logits(lay_out([BatchRow(pages, start, tokens[start:end], EMPTY_TREE, end - start - 1)]))
    tree = path_with_wrong_siblings(tokens[context:], vocab)
    drafted = BatchRow(pages, context - 2, tokens[context - 2 : context], tree, logits_from=1)
    return logits(lay_out([drafted]))[[0, *range(1, 2 * _PATH, 2)]]
