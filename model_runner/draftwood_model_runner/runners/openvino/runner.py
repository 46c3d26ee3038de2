"""Computes steps with OpenVINO on a CPU. Has no exact mode: the bits of a row depend on the width of the batch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import openvino as ov

from draftwood_model_runner.runners.base import NO_LIMITS, DraftLimits, HostStep, KVCompaction, Predictions, StepBatch
from draftwood_model_runner.runners.model_calls import check_rows
from draftwood_model_runner.runners.openvino.output_head import OutputHead
from draftwood_model_runner.runners.openvino.pages import (
    ATTENTION_ROWS,
    PAGE_SIZE,
    KVPages,
    PageLayout,
    paired,
    split_short_chains,
    step_inputs,
    with_own_pages,
)
from draftwood_model_runner.sampling.most_probable import most_probable
from draftwood_model_runner.sampling.token_sampler import TokenSampler, exact_top_k

_LEAST_INPUT = 64
"""Elements that an input has memory for at least."""
_LEAST_TREE = 8
"""A smaller tree gives way to a chain of any length; it concerns a few steps of a sequence."""


class OpenVinoRunner:
    """Implements `runners.base.Runner`.

    Args:
        compiled: a converted model, or its body if there is a `head`.
        layout: the shape of its pages.
        window: tokens that some layer attends to; None if every layer attends to all.
        kv_tokens: capacity of its KV memory.
        threads: CPU threads that look through logits, and that verify.
        head: computes the logits; None if the model does.
    """

    is_asynchronous: ClassVar[bool] = False
    mixed_batches: ClassVar[bool] = False

    def __init__(
        self,
        compiled: ov.CompiledModel,
        layout: PageLayout,
        window: int | None,
        kv_tokens: int,
        threads: int = 1,
        head: OutputHead | None = None,
    ) -> None:
        self._kv = KVPages(layout, kv_tokens + PAGE_SIZE)
        self.pages, self.page_size = self._kv.pages - 1, PAGE_SIZE  # the last one is spare, see `pages.paired`
        self._paired = any(ATTENTION_ROWS in port.get_names() for port in compiled.inputs)
        self._window = window
        self._threads = threads
        self._head = head
        self._has_features = len(compiled.outputs) > 1
        self._request = compiled.create_infer_request()
        self._caches = self._kv.tensors()
        for name, tensor in self._caches.items():
            self._request.set_tensor(name, tensor)
        # A port has more names than that of the input where a model passes its input on as it is, such as GPT-2.
        ports = {name: port for port in compiled.inputs for name in port.get_names()}
        self._inputs = {name: _Input(self._request, port) for name, port in ports.items() if name not in self._caches}

    def draft_limits(self, position: int) -> DraftLimits:
        """PagedAttention counts its window in rows of the step, and in a chain alone these are positions. So trees must
        end within the window, and behind it drafts are chains."""
        if self._window is None:
            return NO_LIMITS
        within_window = self._window - 1 - position
        return DraftLimits(max_nodes=within_window) if within_window >= _LEAST_TREE else DraftLimits(branches=False)

    def step(self, batch: StepBatch, top_k: int) -> Predictions:
        batch = with_own_pages(batch)
        if self._paired:
            inputs = paired(batch, step_inputs(batch), self.pages)
        else:
            inputs = step_inputs(split_short_chains(batch))
        if batch.features is not None:
            inputs["features"] = batch.features[:, None]
            del inputs["input_ids"]
        for name, array in inputs.items():
            self._inputs[name].write(array)
        self._request.infer(share_outputs=True)  # otherwise it copies all outputs
        logits = self._request.get_output_tensor(0).data
        if self._head is not None:
            logits = self._head.logits(logits.reshape(-1, self._head.width), batch.exact_top_k)
        check_rows(logits.shape, batch.logit_rows.size)
        features = self._request.get_output_tensor(1).data if self._has_features else None
        return Predictions(logits, *most_probable(logits, top_k, self._threads), features)

    def begin(self, batch: StepBatch, top_k: int, samplers: SequenceOf[TokenSampler | None]) -> HostStep:
        if self._head is not None:
            batch = replace(batch, exact_top_k=exact_top_k(samplers))
        return HostStep(self, batch, top_k, samplers, self._threads)

    def compact_kv(self, moves: KVCompaction) -> None:
        self._kv.move(moves)


class _Input:
    """An input of the model. Its tensor stays the same over many steps: a new shape takes a tenth of the time that
    setting another tensor takes."""

    def __init__(self, request: ov.InferRequest, port: Any) -> None:
        self._request = request
        self._port = port
        self._memory: npt.NDArray[Any] = np.empty(0)
        self._shape: tuple[int, ...] = ()
        self._tensor: ov.Tensor

    def write(self, array: npt.NDArray[Any]) -> None:
        """Copies an array of numbers of any size."""
        if array.size > self._memory.size or not self._memory.size:
            self._tensor = ov.Tensor(self._port.get_element_type(), ov.Shape([2 * array.size + _LEAST_INPUT]))
            self._memory = self._tensor.data
            self._tensor.shape = self._shape = array.shape
            self._request.set_tensor(self._port, self._tensor)
        elif array.shape != self._shape:
            self._tensor.shape = self._shape = array.shape
        self._memory[: array.size] = array.ravel()
