"""What steps cost on this machine, measured with the model itself on made-up tokens."""

from __future__ import annotations

import time

import numpy as np
import torch

from model_runner.drafting.step_time import StepTimeCurve, StepTimes, measure
from model_runner.loading.model import LoadedModel
from model_runner.runners.torch.attention import Segment, StepBatch
from model_runner.runners.torch.kv_cache import Slab
from model_runner.runners.torch.most_probable import most_probable

_SEVERAL = 4
"""Sequences of a step that is timed for what each further one adds."""


def measure_step_times(model: LoadedModel, largest: int, most_threads: int) -> StepTimes:
    """For each number of CPU threads that a step may run on: what tokens cost, up to `largest` of one sequence, and
    what each further sequence adds. Takes a second or two."""
    curves, per_sequence = {}, {}
    for threads in _thread_counts(most_threads, model.layout.device):
        torch.set_num_threads(threads)
        curves[threads] = measure_curve(model, largest, limit=1.0)
        several = measure_curve(model, largest=1, limit=0.1, sequences=_SEVERAL)
        per_sequence[threads] = max(several.at(1) - curves[threads].at(_SEVERAL), 0.0) / (_SEVERAL - 1)
    return StepTimes(curves, per_sequence)


@torch.inference_mode()
def measure_curve(
    model: LoadedModel, largest: int, limit: float, context: int = 128, sequences: int = 1
) -> StepTimeCurve:
    """What a step costs by the number of tokens of each sequence, on the threads that torch has.

    Args:
        largest: the largest number of tokens; no more than fits the model.
        limit: seconds after which no further round of measurements begins.
        context: committed tokens that a sequence attends to; at most half the model's context is taken.
        sequences: how many share the step.
    """
    context = min(context, model.max_context // 2)
    largest = min(largest, model.max_context - context)
    slabs = [Slab.empty(model.layout, context + 2 * largest) for _ in range(sequences)]

    def seconds(size: int) -> float:
        tokens, depths = np.zeros(size, np.int32), np.arange(size, dtype=np.int32)
        segments = [Segment(slab, context, tokens, depths - 1, depths, logit_rows=0) for slab in slabs]
        started = time.perf_counter()
        most_probable(model.module(**StepBatch(segments, model.layout).inputs()).logits[0], 0)
        return time.perf_counter() - started

    return measure(seconds, largest, limit)


def _thread_counts(most: int, device: torch.device) -> list[int]:
    """What a step may run on: powers of two and all; with the model elsewhere, threads make no difference."""
    if device.type != "cpu":
        return [most]
    return sorted({most, *(1 << bit for bit in range(most.bit_length()) if 1 << bit < most)})
