"""Two mistakes in vLLM's CPU build, in 0.32, that sampled requests meet with any drafts. A caller can end the engine by
them, so they are mended where they are found; what works is left as it is.

- Without Triton, `expand_kernel` of the rejection sampler is given a copy of what it is to fill in, so that
  temperatures, top-k and top-p of a step with drafts are whatever the memory held: samples have a wrong distribution,
  greedy requests beside them may be wrong, and an impossible top-k ends the engine. vLLM has a registry for kernels of
  other platforms.
- `apply_top_k_only` raises for a step that may have drafts and has none.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("draftwood")
_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def repair() -> None:
    """Mends what does not work, if this is the CPU build. Never raises.

    To be called before anything else of ours is imported: vLLM looks into all modules then.
    """
    try:
        _repair()
    except ImportError:
        pass  # a version that has other kernels
    except Exception:
        _log.exception("it is not known whether vLLM's CPU build samples right with drafts")


def _repair() -> None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON or not current_platform.is_cpu():
        return
    if not _expands():
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({_KERNEL: expand})
        _log.info("%s, which does not work in vLLM's CPU build, was replaced", _KERNEL)
    if not _accepts_empty_steps():
        from vllm.v1.sample.ops import topk_topp_sampler

        top_k_only = topk_topp_sampler.apply_top_k_only
        topk_topp_sampler.apply_top_k_only = lambda logits, k: top_k_only(logits, k) if k.numel() else logits


def expand(
    output_ptr: Any,
    input_ptr: Any,
    cu_num_tokens_ptr: Any,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Repeats each value of `input_ptr`, [rows], for the tokens of its row in `output_ptr`, [tokens].

    Args:
        cu_num_tokens_ptr: [rows], tokens of the rows up to and with each.
        replace_from, replace_to: a value that is replaced, by this one.
    """
    values = input_ptr.clone()
    values[values == replace_from] = replace_to
    ends = cu_num_tokens_ptr.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    output_ptr.copy_(values.repeat_interleave(counts))


def _expands() -> bool:
    """Whether vLLM's own kernel fills in what it is given."""
    import torch
    from vllm.v1.sample import rejection_sampler

    output = torch.full((3,), -1.0)
    rejection_sampler.expand_kernel[(2,)](
        output, torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 1
    )
    return bool(output.tolist() == [0.5, 2.0, 2.0])


def _accepts_empty_steps() -> bool:
    """Whether top-k alone works for no tokens."""
    import torch
    from vllm.v1.sample.ops import topk_topp_sampler

    try:
        topk_topp_sampler.apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32))
    except RuntimeError:
        return False
    return True
