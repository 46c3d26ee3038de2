"""From a file of exchanges to rows of token ids: reading, held-out split, tokenizer with chat template, packing.

No torch here: JSONL files, tokenizers and lists of token ids only.
"""

from __future__ import annotations

import json
from bisect import bisect_right, insort
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftwood_model_runner.errors import InvalidInputError, InvalidValueError

PAD, USER, ASSISTANT, END = range(4)
SPECIAL_TOKENS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role']=='user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role']=='assistant' %}<|assistant|>{{ m['content'] }}<|end|>"
    "{% else %}{{ raise_exception(\"role '\" ~ m['role'] ~ \"' is unknown to this model;"
    ' it knows user and assistant") }}{% endif %}'
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MAX_POSITIONS = 2048
"""Longest context in the configurations of tokenizer and model; beyond the training context, a model is untrained."""
_PACKING_POOL = 64
"""Documents that wait to be packed. Of 16 to 1,024, 64 gave the least padding with no document left waiting."""


@dataclass(frozen=True)
class Exchange:
    """One question and its answer."""

    question: str
    answer: str


def read_exchanges(path: Path, field: str) -> list[Exchange]:
    """The exchanges of a JSONL file with `instruction` and `response` in each line; empty lines are skipped.

    Raises:
        InvalidInputError: the file cannot be read, is empty, or has an invalid line; names `field` and the line.
    """
    required = "each line must be a JSON object with the texts 'instruction' and 'response'"
    exchanges = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(field, path, f"not a readable JSONL file in UTF-8 ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts = [row[key] for key in ("instruction", "response")]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(field, f"{path}:{number}", f"{required} ({error!r})") from error
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise InvalidInputError(field, f"{path}:{number}", f"{required}, neither empty")
        exchanges.append(Exchange(*texts))
    if not exchanges:
        raise InvalidInputError(field, path, "contains no exchange")
    return exchanges


def split(
    exchanges: list[Exchange], heldout: list[Exchange] | None, fraction: float, seed: int
) -> tuple[list[Exchange], list[Exchange]]:
    """(training, held-out): the held-out exchanges are those given, or else a random `fraction`.

    Exchanges that share their question or their answer with a held-out exchange are left out of training.

    Raises:
        InvalidInputError: no exchange is left to train on.
        InvalidValueError: `fraction` holds out no exchange, or all.
    """
    if heldout is None:
        size = round(len(exchanges) * fraction) if 0 < fraction < 1 else 0
        if not 0 < size < len(exchanges):
            raise InvalidValueError(
                "heldout_fraction", fraction, f"it must hold out some of {len(exchanges)} exchanges, not all"
            )
        chosen = np.random.default_rng(seed).choice(len(exchanges), size, replace=False)
        heldout = [exchanges[i] for i in sorted(chosen)]
    questions, answers = {e.question for e in heldout}, {e.answer for e in heldout}
    training = [e for e in exchanges if e.question not in questions and e.answer not in answers]
    if not training:
        raise InvalidInputError("data", None, f"all {len(exchanges)} exchanges share a text with a held-out one")
    return training, heldout


def trained_tokenizer(exchanges: list[Exchange], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the chat template: at most `vocab_size` tokens, the special ones first."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((text for e in exchanges for text in (e.question, e.answer)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=SPECIAL_TOKENS[USER],
        eos_token=SPECIAL_TOKENS[END],
        pad_token=SPECIAL_TOKENS[PAD],
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def encoded(tokenizer: Any, exchanges: list[Exchange]) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) token ids of each exchange: `<|user|>question<|assistant|>` and `answer<|end|>`.

    A special token spelled in a text is encoded as ordinary characters.
    """
    questions, answers = (
        tokenizer(texts, add_special_tokens=False, split_special_tokens=True).input_ids
        for texts in ([e.question for e in exchanges], [e.answer for e in exchanges])
    )
    for question, answer in zip(questions, answers, strict=True):
        yield [USER, *question, ASSISTANT], [*answer, END]


def packed_rows(documents: SequenceOf[list[int]], context: int, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Endless (tokens, positions) rows of `context` tokens; every epoch has its own order.

    Best-fit packing: a row takes the longest waiting document that fits, until none does; the rest is padding (5% of
    the bundled model's data). Documents stay whole, but are cut at the length of a row. Positions restart at 0 with
    each document and are 0 on padding.
    """
    epochs = (np.random.default_rng((seed, epoch)).permutation(len(documents)) for epoch in count())
    stream = (documents[i][:context] for order in epochs for i in order)
    waiting = sorted(islice(stream, _PACKING_POOL), key=len)
    while True:
        tokens: list[int] = []
        positions: list[int] = []
        while (fitting := bisect_right(waiting, context - len(tokens), key=len)) > 0:
            document = waiting.pop(fitting - 1)
            tokens += document
            positions += range(len(document))
            insort(waiting, next(stream), key=len)
        padding = context - len(tokens)
        yield tokens + [PAD] * padding, positions + [0] * padding
