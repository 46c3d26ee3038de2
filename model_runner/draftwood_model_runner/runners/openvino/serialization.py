"""Converted models in files, so that a later start neither converts nor compares them with their modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov

from draftwood_model_runner.runners.openvino.factory import OpenVinoRunnerFactory, core
from draftwood_model_runner.runners.openvino.graph.bfloat16 import restore_marks
from draftwood_model_runner.runners.openvino.graph.paged_attention import ConvertedModel, restore_heads
from draftwood_model_runner.runners.openvino.kv_pages import PageLayout
from draftwood_model_runner.runners.openvino.probe import trial_logits

_GRAPH, _WEIGHTS, _TRIAL = "model.xml", "model.bin", "trial.npy"
_GRAPH_BYTES = 16 << 20
"""Of the graph and the logits of the trial; 5 MB with 49,152 tokens, 11 MB with 151,936."""


def save(factory: OpenVinoRunnerFactory, folder: Path, vocab: int, max_context: int) -> None:
    """Writes a model that has passed the comparison, without its layout and window, and logits that it computes."""
    ov.serialize(factory.converted.model, folder / _GRAPH, folder / _WEIGHTS)
    np.save(folder / _TRIAL, trial_logits(factory.runner, vocab, max_context), allow_pickle=False)


def file_bytes(factory: OpenVinoRunnerFactory) -> int:
    """Of the files of a model, about, and at most."""
    nodes = (node for node in factory.converted.model.get_ordered_ops() if node.get_type_name() == "Constant")
    return _GRAPH_BYTES + sum(int(node.get_byte_size()) for node in nodes)


def load(
    folder: Path,
    layout: PageLayout,
    window: tuple[int | None, bool],
    vocab: int,
    max_context: int,
    threads: int | None,
) -> OpenVinoRunnerFactory:
    """A model that `save` wrote.

    Args:
        window: of the `ConvertedModel`, and whether it is in every layer.

    Raises:
        Exception: it cannot be read, or does not compute the logits that it did, bit by bit.
    """
    core().get_property("CPU", "FULL_DEVICE_NAME")  # the plugin of the CPU brings the operator PagedAttention
    model = core().read_model(folder / _GRAPH, folder / _WEIGHTS)
    restore_heads(model, layout)
    restore_marks(model)
    factory = OpenVinoRunnerFactory(ConvertedModel(model, layout, *window), threads)
    expected = np.load(folder / _TRIAL, allow_pickle=False)
    if not np.array_equal(trial_logits(factory.runner, vocab, max_context), expected):
        raise ValueError("it does not compute what it did when it was saved")
    return factory
