"""Replaces the small operations of a model by kernels that do several at once, and products by fewer ones.

Between two matrix products a layer of transformers launches some thirty kernels, each of which takes longer to start
than to run. What is replaced is found by its shape and then tried: where a kernel computes something else than the
module does, beyond rounding, the module stays as it was.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from draftwood_model_runner.runners.cuda.fusing.mlps import fuse_mlp
from draftwood_model_runner.runners.cuda.fusing.norms import fuse_norm
from draftwood_model_runner.runners.cuda.fusing.products import join_products
from draftwood_model_runner.runners.cuda.fusing.residuals import fuse_residuals
from draftwood_model_runner.runners.cuda.fusing.rotation import fuse_rotation

_log = logging.getLogger(__name__)
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@torch.inference_mode()
def fuse(module: Any, exact: bool = False) -> dict[str, int]:
    """Replaces what can be in a model, and in the file of its class; returns how much of what.

    Norms, MLPs and layers of the model change for good, and weights become parts of larger tensors. The rotation of a
    file is shared by its models: it is the old one wherever no step is computed.

    Args:
        module: a model of transformers.
        exact: no products are joined, as linear layers are replaced.
    """
    counts = dict.fromkeys(("norms", "MLPs", "joined products", "residuals", "rotations"), 0)
    for part in module.modules():
        if "forward" in vars(part):
            continue
        if type(part).__name__.endswith("RMSNorm"):
            counts["norms"] += fuse_norm(part)
        elif {*dict(part.named_children())} >= _MLP:
            counts["MLPs"] += fuse_mlp(part, module.dtype)
    for part in module.modules():
        counts["joined products"] += 0 if exact else join_products(part)
        counts["residuals"] += fuse_residuals(part)
    counts["rotations"] += fuse_rotation(sys.modules[type(module).__module__])
    _log.info("fused: %s", ", ".join(f"{count} {what}" for what, count in counts.items()))
    return counts
