"""The served model as the service needs it: its properties, its tokenizer, and the limits of requests."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol, Self

from draftwood_model_runner.engine_config import Abilities
from draftwood_model_runner.loading.facts import DraftModelFacts, ModelFacts
from draftwood_model_runner.request import GrammarKind
from draftwood_model_runner.sequence import Grammar
from draftwood_service.settings import Settings
from draftwood_service.tools import (
    ChatTokenizer,
    NoToolFormatError,
    ReasoningFormat,
    ToolFormat,
    reasoning_format_of,
    tool_format_of,
)
from draftwood_strategies.arrays import Int32Array

_CHARACTERS_OF_TOKEN = 16
"""Characters of a prompt for each token of the context, four times what text has on average."""
_MIN_CHARACTERS = 65_536


class TokenBytes(Protocol):
    """`draftwood_model_runner.loading.tokenizer.TokenBytes`. Called from several threads."""

    @property
    def special(self) -> frozenset[int]: ...
    @property
    def special_ids(self) -> Mapping[str, int]: ...
    def __call__(self, token: int) -> bytes: ...
    def text(self, token: int) -> str: ...


class TextTokenizer(ChatTokenizer, Protocol):
    """`draftwood_model_runner.loading.tokenizer.Tokenizer`, as far as requests need it. Called from several threads."""

    @property
    def takes_system(self) -> bool: ...
    @property
    def token_bytes(self) -> TokenBytes: ...
    def encode(self, text: str) -> Int32Array: ...
    @property
    def template_variables(self) -> frozenset[str]: ...
    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = ...,
    ) -> Int32Array: ...
    def decode(self, ids: SequenceOf[int] | Int32Array, include_special_tokens: bool = False) -> str: ...
    def files(self) -> dict[str, bytes]: ...


class Grammars(Protocol):
    """`draftwood_model_runner.sampling.grammar.GrammarCompiler`. Called from several threads."""

    def compile(self, kind: GrammarKind, text: str) -> Grammar: ...


class GrammarChecks(Protocol):
    """`draftwood_service.rpc.grammar_trial.GrammarTrials`. Called from several threads."""

    def check(self, kind: GrammarKind, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ModelInfo(ModelFacts):
    """The properties of a model, sent from the engine's process. The service adds tokenizer and grammars."""

    name: str
    exact: bool
    runner_name: str
    abilities: Abilities
    draft_models: tuple[DraftModelFacts, ...] = ()

    @classmethod
    def of(cls, model: Any) -> Self:
        """Taken from a `draftwood_model_runner.loading.model.LoadedModel`."""
        return cls(**{field.name: getattr(model, field.name) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class ServedModel(ModelInfo):
    """A model with its weights in the engine's process, and what requests need of it here."""

    tokenizer: TextTokenizer
    grammars: GrammarChecks

    @cached_property
    def tool_format(self) -> ToolFormat | NoToolFormatError:
        """How the model writes calls of tools, or why it is given none."""
        return tool_format_of(self.tokenizer)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the model marks its reasoning; None for one that writes none."""
        return reasoning_format_of(self.tokenizer)


@dataclass(frozen=True, slots=True)
class Serving:
    """A model, and the settings that requests are checked against."""

    model: ServedModel
    settings: Settings

    @property
    def max_prompt_characters(self) -> int:
        """Maximum number of characters of a prompt, all chat messages together."""
        if self.settings.max_prompt_characters is not None:
            return self.settings.max_prompt_characters
        return max(_CHARACTERS_OF_TOKEN * self.model.max_context, _MIN_CHARACTERS)
