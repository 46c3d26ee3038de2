"""What a model's generation config asks for: defaults of requests, and constraints that hold for every one.

transformers' `generate` reads the same config, so that a request that sets nothing gets its answer.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.request import SamplingParams

_log = logging.getLogger(__name__)

SOURCES = ("model", "greedy")

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "diversity_penalty": (0.0,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "constraints": (),
    "force_words_ids": (),
    "watermarking_config": (),
    "forced_bos_token_id": (),
    "stop_strings": (),
    "dola_layers": (),
}
"""Fields that change what `generate` writes and that we do not have, with the values, besides None, that do not."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Tokens that the model's generation config forbids or forces, whatever a request says.

    Attributes:
        no_repeat_ngram_size: no run of so many tokens, the prompt's included, is written again; 0 for any.
        bad_words: sequences of tokens that are not written.
        suppressed, suppressed_first: tokens that are never written, and not as the first one.
        forced_last: one of these is the last token if the answer reaches its length limit.
    """

    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    forced_last: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return any(asdict(self).values())


NO_CONSTRAINTS = Constraints()
_GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What holds if a request sets nothing. The defaults of the defaults are greedy decoding to the end of the context.

    Attributes:
        max_tokens: new tokens at most; None for as many as fit the context.
    """

    sampling: SamplingParams = _GREEDY
    min_tokens: int = 0
    max_tokens: int | None = None
    constraints: Constraints = NO_CONSTRAINTS


def generation_defaults(
    name: str, config: Any, source: str = "model", vocab_size: int | None = None
) -> GenerationDefaults:
    """The defaults of a model.

    Args:
        name: of the model, for errors.
        config: its `GenerationConfig`; None for a model without one.
        source: "model" reads the config; "greedy" ignores it.
        vocab_size: of the model; tokens outside of it are left out of the constraints, with a warning.

    Raises:
        UnsupportedModelError: the config asks for what we do not have; names the field and its value.
    """
    if config is None or source == "greedy":
        return GenerationDefaults()
    fields = {field: value for field, value in config.to_dict().items() if value is not None}
    for field, neutral in _NEUTRAL.items():
        if field in fields and fields[field] not in neutral:
            raise UnsupportedModelError(
                f"{name}: its generation config sets {field} to {fields[field]!r}, which is not supported; remove it,"
                " or ignore the config by --generation-defaults greedy"
            )

    def tokens(field: str) -> tuple[int, ...]:
        return _in_vocabulary(field, _tokens(fields.get(field)), vocab_size)

    bad_words = (tuple(words) for words in fields.get("bad_words_ids", ()))
    return GenerationDefaults(
        sampling=_sampling(fields),
        min_tokens=int(fields.get("min_new_tokens", 0)),
        max_tokens=fields.get("max_new_tokens"),
        constraints=Constraints(
            no_repeat_ngram_size=int(fields.get("no_repeat_ngram_size", 0)),
            bad_words=tuple(
                words for words in bad_words if _in_vocabulary("bad_words_ids", words, vocab_size) == words
            ),
            suppressed=tokens("suppress_tokens"),
            suppressed_first=tokens("begin_suppress_tokens"),
            forced_last=tokens("forced_eos_token_id"),
        ),
    )


def eos_token_ids(module: Any) -> frozenset[int]:
    """The tokens that end an answer of `generate`: the generation config's, even if the model's own has others."""
    return end_tokens(module.config.get_text_config(), module.generation_config)


def end_tokens(config: Any, generation: Any) -> frozenset[int]:
    """The same by a model's own config and its generation config; None if it has none of these. Tokens outside of the
    vocabulary, which no answer can have, are left out with a warning."""
    named = _tokens(config.eos_token_id if generation is None else generation.eos_token_id)
    return frozenset(_in_vocabulary("eos_token_id", named, config.vocab_size))


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    penalty = float(fields.get("repetition_penalty", 1.0))
    if not fields.get("do_sample", False):
        return SamplingParams(repetition_penalty=penalty)
    return SamplingParams(
        temperature=float(fields.get("temperature", 1.0)),
        top_k=int(fields.get("top_k", 50)),  # what `generate` takes if a config samples and names none
        top_p=float(fields.get("top_p", 1.0)),
        min_p=float(fields.get("min_p", 0.0)),
        repetition_penalty=penalty,
    )


def _tokens(value: Any) -> tuple[Any, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _in_vocabulary(field: str, tokens: tuple[Any, ...], vocab_size: int | None) -> tuple[int, ...]:
    """Those that a model has, of the tokens in a field of its config."""
    inside = tuple(t for t in tokens if isinstance(t, int) and (vocab_size is None or 0 <= t < vocab_size))
    if inside != tokens:
        outside = ", ".join(repr(token) for token in tokens if token not in inside)
        allowed = f"[0, {vocab_size - 1}]" if vocab_size is not None else "numbers"
        _log.warning("%s of the model's config: left out %s, as its vocabulary is %s", field, outside, allowed)
    return inside
