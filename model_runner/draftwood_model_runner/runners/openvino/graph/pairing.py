"""Makes the bits of a token's logits depend less on the batch: attention never computes a single token of a sequence.

PagedAttention has one kernel for sequences with one token in the step and another for two and more. They round
differently, so that drafting off, which takes single tokens, would often meet other ties than drafts: in bfloat16, and
with 8-bit weights, where a small difference can become a step of the 8-bit activations. All else in a step has the same
bits at any width. So attention computes a single token twice, as a chain of two; the second has its keys and values in
the next slot, which nothing reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.openvino.kv_pages import PAGE_SIZE
from draftwood_strategies.draft import Int32Array

ATTENTION_ROWS, TOKEN_ROWS = "attention_rows", "token_rows"


def pair_single_tokens(model: ov.Model) -> None:
    """Gives a converted model two inputs: attention_rows int32[A], the tokens of the step that attention computes, and
    token_rows int32[T], the place of each token among them. See `paired`."""
    parameters = []
    for name in (ATTENTION_ROWS, TOKEN_ROWS):
        parameter = ops.parameter(ov.PartialShape([-1]), ov.Type.i32, name=name)
        parameter.output(0).get_tensor().set_names({name})
        parameters.append(parameter)
    attention_rows, token_rows = parameters
    zero = ops.constant(np.array(0, np.int32))
    for attention in [node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]:
        for port in range(3):
            attention.set_argument(port, ops.gather(attention.input_value(port), attention_rows, zero).output(0))
        consumers = attention.output(0).get_target_inputs()
        kept = ops.gather(attention.output(0), token_rows, zero)
        for consumer in consumers:
            consumer.replace_source_output(kept.output(0))
    model.add_parameters(parameters)
    model.validate_nodes_and_infer_types()


def paired(batch: StepBatch, inputs: dict[str, npt.NDArray[Any]], spare_page: int) -> dict[str, npt.NDArray[Any]]:
    """The inputs of a step for a model that `pair_single_tokens` changed.

    Args:
        inputs: those of the model as it was converted.
        spare_page: holds the second tokens of sequences that end with their last page.
    """
    sizes = np.diff(batch.cu_seqlens)
    single = sizes == 1
    repeats = np.ones(batch.size, np.int32)
    repeats[batch.cu_seqlens[:-1][single]] = 2
    attention_rows = np.repeat(np.arange(batch.size, dtype=np.int32), repeats)
    token_rows = (np.cumsum(repeats) - repeats).astype(np.int32)
    cu_seqlens = np.zeros_like(batch.cu_seqlens)
    np.cumsum(sizes + single, out=cu_seqlens[1:])
    pages, cu_blocks = _with_spare_page(batch, single, spare_page)
    return inputs | {
        ATTENTION_ROWS: attention_rows,
        TOKEN_ROWS: token_rows,
        "subsequence_begins": cu_seqlens,
        "block_indices": pages,
        "block_indices_begins": cu_blocks,
        "max_context_len": np.array((batch.context_lens + sizes + single).max(), np.int32),
    }


def _with_spare_page(batch: StepBatch, single: npt.NDArray[np.bool_], spare_page: int) -> tuple[Int32Array, Int32Array]:
    """`block_table` and `cu_blocks`, with the spare page behind the pages of each full sequence of one token."""
    full = single & (batch.context_lens + 1 == PAGE_SIZE * np.diff(batch.cu_blocks))
    if not full.any():
        return batch.block_table, batch.cu_blocks
    pages = np.insert(batch.block_table, batch.cu_blocks[1:][full], spare_page).astype(np.int32)
    cu_blocks = batch.cu_blocks.copy()
    cu_blocks[1:] += np.cumsum(full, dtype=np.int32)
    return pages, cu_blocks
