"""The tokens that a step writes: chosen on the device, with the paths of draft trees that they accept."""

from __future__ import annotations

import numpy as np
import torch

from draftwood_model_runner.runners.cuda.constants import SAMPLING_BLOCK, SAMPLING_ENTRIES
from draftwood_model_runner.runners.cuda.device.buffer import to_device
from draftwood_model_runner.runners.cuda.device.launching import launch
from draftwood_model_runner.runners.cuda.kernels.kv import move_kv
from draftwood_model_runner.runners.cuda.kernels.sampling import sample_tokens
from draftwood_model_runner.runners.cuda.kernels.scores import adjust_scores
from draftwood_model_runner.runners.cuda.kernels.walking import accept_paths
from draftwood_model_runner.runners.cuda.kv_cache import PAGE_SIZE, KVPages
from draftwood_model_runner.runners.cuda.steps.attention import power_of_2
from draftwood_model_runner.runners.cuda.steps.step_arrays import StepArrays
from draftwood_model_runner.sampling.metadata import SAMPLED, SamplingMetadata, SamplingTensors

_AS_ON_HOST = {"enable_fp_fusion": False}
"""Products and sums are rounded one by one."""


def sample_and_accept(
    logits: torch.Tensor, sampled: torch.Tensor, arrays: StepArrays, sampling: SamplingMetadata, kv: KVPages
) -> None:
    """Chooses the tokens after the rows of logits, and keeps what is accepted; the host does not wait.

    Args:
        logits: [R, vocab].
        sampled: int32[R], the most probable token after each row, in and out.
    """
    batch_rows = sampling.kinds.size
    offsets = arrays.buffer.host["logit_offsets"][: batch_rows + 1]
    if sampling.sequences:
        _sample(logits, sampled, arrays, sampling)
    most = int((offsets[1:] - offsets[:-1]).max())
    if most <= 1:
        return
    moves = torch.empty((int(offsets[-1]), 2), dtype=torch.int64, device=logits.device)
    counts = torch.empty(batch_rows, dtype=torch.int32, device=logits.device)
    launch(
        accept_paths,
        (batch_rows,),
        *(sampled, arrays.tokens, arrays.parents, arrays.slots, arrays.logit_rows, arrays.logit_offsets, arrays.kinds),
        *(moves, counts, sampled.stride(0)),
        NODES=max(16, power_of_2(most)),
    )
    move(kv, moves, arrays.logit_offsets, counts)


def log_probabilities(
    logits: torch.Tensor, sampled: torch.Tensor, arrays: StepArrays, sampling: SamplingMetadata
) -> tuple[torch.Tensor, ...] | None:
    """`Logprobs` on the host, which are there when the stream has come so far; None if no sequence reports any.

    Args:
        logits: [R, vocab].
        sampled: int32[R], the tokens that are written.
    """
    reporting = (sampling.logprobs >= 0).nonzero()[0]
    if not reporting.size:
        return None
    offsets, count = arrays.buffer.host["logit_offsets"], int(sampling.logprobs.max())
    rows = np.concatenate([np.arange(offsets[row], offsets[row + 1], dtype=np.int64) for row in reporting])
    wanted = to_device({"rows": rows}, logits.device)["rows"]
    scores = torch.log_softmax(logits[wanted].float(), -1)
    written = scores.gather(1, sampled[wanted].clamp(min=0).long()[:, None])[:, 0]
    values, tokens = scores.topk(count, dim=-1)
    found = []
    for part in (written, tokens.int(), values):
        on_host = torch.zeros((logits.shape[0], *part.shape[1:]), dtype=part.dtype, pin_memory=logits.is_cuda)
        on_device = torch.zeros_like(on_host, device=logits.device).index_copy_(0, wanted, part)
        found.append(on_host.copy_(on_device, non_blocking=True))
    return tuple(found)


def move(kv: KVPages, moves: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor) -> None:
    """Moves entries in every layer.

    Args:
        moves: int64[m, 2], source and target slots.
        offsets: int32[n or more], the first move of each sequence.
        counts: int32[n], how many moves it has.
    """
    for shape, memory in kv.by_shape.items():
        width = shape.key_dim + shape.value_dim
        launch(
            move_kv,
            (memory.shape[0], shape.kv_heads, counts.shape[0]),
            *(memory, moves, offsets, counts, memory.stride(0)),
            KV_HEADS=shape.kv_heads,
            WIDTH=width,
            BLOCK=power_of_2(width),
            PAGE_SIZE=PAGE_SIZE,
        )


def _sample(logits: torch.Tensor, sampled: torch.Tensor, arrays: StepArrays, sampling: SamplingMetadata) -> None:
    vocab, offsets = logits.shape[1], arrays.buffer.host["logit_offsets"]
    rows = (sampling.kinds == SAMPLED).nonzero()[0]
    firsts, lasts = offsets[rows], offsets[rows + 1]
    tensors = to_device(SamplingTensors.of(sampling.sequences, firsts, lasts)._asdict(), logits.device)
    first, of_rows = int(firsts[0]), (tensors["row_sequences"], tensors["row_masks"])
    scores = torch.empty((int(lasts[-1]) - first, vocab), dtype=torch.float32, device=logits.device)
    weighed = any(one.params.top_p < 1.0 or one.params.min_p > 0.0 for one in sampling.sequences)
    weights = torch.empty_like(scores) if weighed else scores
    launch(
        adjust_scores,
        (scores.shape[0],),
        *(logits, scores, first, *of_rows, tensors["masks"]),
        *(arrays.logit_rows, arrays.parents, arrays.tokens, arrays.positions),
        *(tensors[name] for name in ("unlocked_at", "penalties", "offsets", "tokens", "counts", "biases", "flags")),
        *(vocab, logits.stride(0), tensors["masks"].shape[1]),
        BLOCK=SAMPLING_BLOCK,
        ENTRIES=SAMPLING_ENTRIES,
        **_AS_ON_HOST,
    )
    launch(
        sample_tokens,
        (scores.shape[0],),
        *(scores, weights, sampled, first, *of_rows, arrays.logit_rows, arrays.positions),
        *(tensors[name] for name in ("temperatures", "top_ks", "dropped_shares", "least_weights", "seeds")),
        *(vocab, sampled.stride(0)),
        BLOCK=SAMPLING_BLOCK,
        **_AS_ON_HOST,
    )
