"""A loaded model, with what serving needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.loading.tokenizer import Tokenizer
from model_runner.runners.base import RunnerFactory
from model_runner.sampling.generation_defaults import GenerationDefaults
from model_runner.sampling.grammar import GrammarCompiler


@dataclass(frozen=True, eq=False, slots=True)
class LoadedModel:
    """A model that trees can be verified on, with what serving needs to know of it.

    Attributes:
        factory: the model as its runner computes it; makes runners.
        runner_reason: why by this runner.
        architecture: class of the transformers model.
        dtype: "float32", "bfloat16" or "float16": of the computation.
        weights: what they are stored as: `dtype`, or "int8".
        device: "cpu", "cuda:0", ...
        fingerprint: 16 hexadecimal digits of model and tokenizer, the same wherever the same files are loaded.
        max_context: tokens of prompt and output together.
        defaults: what the generation config of the model asks for.
    """

    name: str
    factory: RunnerFactory
    runner_reason: str
    tokenizer: Tokenizer
    grammars: GrammarCompiler
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

    @property
    def runner_name(self) -> str:
        """The kind of runner that computes the model: "torch" or "openvino"."""
        return self.factory.name

    @property
    def exact(self) -> bool:
        """Outputs are bit-identical with and without drafts, in any batch."""
        return self.factory.exact
