"""How long a step takes on a GPU, from the bytes that it reads, what it multiplies and the kernels that it launches.

A roofline (Williams et al., 2009) with a price for each kernel, which a run on an H200 corrected. Other GPUs, and
several, were not measured.
"""

from __future__ import annotations

from typing import NamedTuple

BANDWIDTH_SHARE = 0.78
"""Of a GPU's bandwidth by its data sheet that matrix products with few rows, and attention to long contexts, reached on
an H200. A copy reached 0.85."""
ARITHMETIC_SHARE = 0.6
"""Of its peak that they reach with many rows."""
KERNEL_SECONDS = 2e-6
"""Of a small kernel in a CUDA graph, and of what a larger one does not overlap with the next: 1.9 to 2.3 us on an
H200."""
LAYER_KERNELS, OTHER_KERNELS = 11, 23
"""Of a Llama layer and of the rest of a step. The recorder of the cuda runner counts 16 of it in float32; bfloat16
adds 2 casts, accepting a path 2 kernels, and input, logits and output a copy each."""
SHARDED_KERNELS = 3
"""More of a layer that several GPUs share: its products are not joined."""
ALL_REDUCE_SECONDS = 12e-6
"""Of a few rows over NVLink; two in each layer of a divided model."""


class Device(NamedTuple):
    """A GPU by its data sheet.

    Attributes:
        bandwidth: bytes a second.
        arithmetic: operations a second in bfloat16, without sparsity.
        memory: bytes.
    """

    name: str
    bandwidth: float
    arithmetic: float
    memory: float


class Model(NamedTuple):
    """A model in bfloat16.

    Attributes:
        kv_width: numbers of the keys of one token in one layer, and as many of its values.
        gpus: that share it (tensor parallel).
    """

    name: str
    parameters: float
    layers: int
    width: int
    kv_width: int
    gpus: int = 1


DEVICES = (
    Device("H200", 4.8e12, 989e12, 141e9),
    Device("H100", 3.35e12, 989e12, 80e9),
    Device("L4", 0.3e12, 121e12, 24e9),
)
MODELS = (
    Model("7B (Llama 2)", 6.74e9, 32, 4096, 4096),
    Model("8B (Llama 3)", 8.03e9, 32, 4096, 1024),
    Model("70B (Llama 3), 4 GPUs", 70.6e9, 80, 8192, 1024, gpus=4),
)
STREAMS = (1, 8, 64)


class Prediction(NamedTuple):
    """A step.

    Attributes:
        floor: seconds in which the bytes that it must read go through the memory's bus.
        seconds: predicted, without the host.
    """

    floor: float
    seconds: float


def fits(device: Device, model: Model, streams: int, context: int) -> bool:
    """Whether weights, keys and values have room, and a tenth of the memory remains."""
    return _weights(model) + _kv(model, streams, context) < 0.9 * device.memory


def predict(device: Device, model: Model, streams: int, nodes: int, context: int) -> Prediction:
    """A step of so many streams, each with a draft of `nodes` tokens beside the last one, after `context` tokens."""
    tokens = streams * (1 + nodes)
    moved = _weights(model) + _kv(model, streams, context)
    products = 2 * model.parameters * tokens / model.gpus
    attention = 4 * model.layers * model.width * tokens * context / model.gpus
    work = max(
        _weights(model) / (BANDWIDTH_SHARE * device.bandwidth), products / (ARITHMETIC_SHARE * device.arithmetic)
    ) + max(
        _kv(model, streams, context) / (BANDWIDTH_SHARE * device.bandwidth),
        attention / (ARITHMETIC_SHARE * device.arithmetic),
    )
    sharded = model.gpus > 1
    kernels = model.layers * (LAYER_KERNELS + sharded * SHARDED_KERNELS) + OTHER_KERNELS
    reductions = sharded * 2 * model.layers
    launches = kernels * KERNEL_SECONDS + reductions * ALL_REDUCE_SECONDS
    return Prediction(moved / device.bandwidth, work + launches)


def best_nodes(device: Device, model: Model, streams: int, context: int, dearer: float = 1.2) -> int:
    """The largest draft of a stream, of those tried, that makes a step at most `dearer` times as long."""
    plain = predict(device, model, streams, 0, context).seconds
    tried = (0, 1, 3, 7, 15, 31, 63, 127, 255)
    return max(n for n in tried if predict(device, model, streams, n, context).seconds <= dearer * plain)


def rows(context: int = 2048) -> list[dict[str, object]]:
    """The predictions, for every device, model and number of streams that fits its memory."""
    found: list[dict[str, object]] = []
    for device in DEVICES:
        for model in MODELS:
            for streams in STREAMS:
                if not fits(device, model, streams, context):
                    continue
                one, tree = (predict(device, model, streams, nodes, context) for nodes in (0, 63))
                found.append(
                    {
                        "device": device.name,
                        "model": model.name,
                        "streams": streams,
                        "floor_ms": round(1e3 * one.floor, 2),
                        "one_token_ms": round(1e3 * one.seconds, 2),
                        "over_floor": round(one.seconds / one.floor, 2),
                        "tree_of_64_ms": round(1e3 * tree.seconds, 2),
                        "tree_over_one": round(tree.seconds / one.seconds, 2),
                        "nodes_within_1.2": best_nodes(device, model, streams, context),
                    }
                )
    return found


def markdown(context: int = 2048) -> str:
    """`rows` as a table."""
    found = rows(context)
    heads = list(found[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(str(row[head]) for head in heads) + " |" for row in found]
    return "\n".join(lines) + "\n"


def _weights(model: Model) -> float:
    return 2 * model.parameters / model.gpus


def _kv(model: Model, streams: int, context: int) -> float:
    return 4.0 * model.layers * model.kv_width * streams * context / model.gpus
