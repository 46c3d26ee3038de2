"""A loaded model, with what serving needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftwood_model_runner.engine_config import Abilities
from draftwood_model_runner.loading.facts import ModelFacts
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.runners.base import RunnerFactory
from draftwood_model_runner.sampling.grammar import GrammarCompiler


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedModel(ModelFacts):
    """A model that trees can be verified on, with what serving needs to know of it.

    Attributes:
        factory: the model as its runner computes it; makes runners.
        step_times_file: where what its steps cost is kept; None for a model that is converted at each start.
    """

    name: str
    factory: RunnerFactory
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    step_times_file: Path | None = None

    @property
    def runner_name(self) -> str:
        """The kind of runner that computes the model: "cuda", "openvino" or "torch"."""
        return self.factory.name

    @property
    def abilities(self) -> Abilities:
        """Those of Draftwood's own engine."""
        return Abilities()

    @property
    def exact(self) -> bool:
        """Outputs are bit-identical with and without drafts, in any batch."""
        return self.factory.exact
