"""What an engine can do: the service refuses the rest before a request is sent to it. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood_model_runner.request import MAX_LOGPROBS, GrammarKind

DRAFTWOOD = "draftwood"
"""The name of Draftwood's own engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What one engine can do. The defaults are those of Draftwood's own.

    Attributes:
        engine: its name, as in the setting `engine`.
        version: of the program that it runs in, if that is another one; else "".
        reproducible_seeds: the same seed gives the same tokens. Otherwise seeds choose nothing, and sampled answers
            have the distribution that was asked for.
        draft_trees: outputs show the verified drafts.
        branching_drafts: drafts are trees; otherwise each is one chain of tokens.
        min_p, logit_bias: of sampling.
        max_temperature, max_penalty: bounds of the temperature, and of presence and frequency penalties either way.
        max_logprobs: tokens reported beside each token that is written.
        formats: kinds of grammars that an answer can follow.
        pauses: a request whose client does not read gives up its slot.
        preempts: a running request gives up its slot to one of a tenant that holds less for its weight.
        audits_samples: sampled answers are audited as well as greedy ones.
    """

    engine: str = DRAFTWOOD
    version: str = ""
    reproducible_seeds: bool = True
    draft_trees: bool = True
    branching_drafts: bool = True
    min_p: bool = True
    logit_bias: bool = True
    max_temperature: float = 100.0
    max_penalty: float = 100.0
    max_logprobs: int = MAX_LOGPROBS
    formats: tuple[GrammarKind, ...] = tuple(GrammarKind)
    pauses: bool = True
    preempts: bool = True
    audits_samples: bool = True
