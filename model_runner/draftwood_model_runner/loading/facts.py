"""What is known of a loaded model besides its weights: picklable, and imported by a process that loads none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from draftwood_model_runner.sampling.generation_defaults import GenerationDefaults


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The properties of a model and of its computation.

    Attributes:
        runner_reason: why by this runner.
        architecture: class of the transformers model.
        dtype: "float32", "bfloat16" or "float16": of the computation.
        weights: what they are stored as: `dtype`, "int8", "int4", or the quantization of the checkpoint, such as
            "torchao".
        device: "cpu", "cuda:0", ...
        fingerprint: 16 hexadecimal digits of model and tokenizer, the same wherever the same files are loaded.
        max_context: tokens of prompt and output together.
        defaults: what the generation config of the model asks for.
    """

    runner_reason: str
    architecture: str
    dtype: str
    weights: str
    device: str
    fingerprint: str
    parameters: int
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    defaults: GenerationDefaults


class DraftModelFacts(NamedTuple):
    """The properties of a model that drafts beside another.

    Attributes:
        strategy: that drafts by it.
        name: that clients see: of the model, or of the folder of the head.
        parameters: weights, those that it shares with the other aside.
    """

    strategy: str
    name: str
    parameters: int
