"""From a support file to rows of token ids: reading, holding out, the tokenizer with its chat template, packing.

Knows JSONL files and tokenizers; no torch, nothing of how a model is trained on the rows.
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

from model_runner.errors import InvalidValueError

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
"""What the configuration of tokenizer and model admits; beyond the context trained at, a model is untrained."""
_PACKING_POOL = 64
"""Documents that wait to be packed; of 16 to 1,024, 64 leave least padding without leaving a document behind."""


@dataclass(frozen=True)
class Exchange:
    """One question and its answer."""

    question: str
    answer: str


def read_exchanges(path: Path, field: str) -> list[Exchange]:
    """The exchanges of a JSONL file with `instruction` and `response` in each line; empty lines are skipped.

    Raises:
        InvalidValueError: no such file, no line in it, or a line that is no such object; names `field` and the line.
    """
    allowed = "each line is a JSON object with the texts 'instruction' and 'response'"
    exchanges = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(field, str(path), f"a readable JSONL file in UTF-8 ({error})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts = [row[key] for key in ("instruction", "response")]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidValueError(field, f"{path}:{number}", f"{allowed} ({error!r})") from error
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise InvalidValueError(field, f"{path}:{number}", f"{allowed}, neither empty")
        exchanges.append(Exchange(*texts))
    if not exchanges:
        raise InvalidValueError(field, str(path), "a file with at least one exchange")
    return exchanges


def split(
    exchanges: list[Exchange], heldout: list[Exchange] | None, fraction: float, seed: int
) -> tuple[list[Exchange], list[Exchange]]:
    """(training, held-out): held out are the given exchanges, or else a random `fraction`.

    Training leaves out whatever has its question or its answer in common with a held-out exchange.

    Raises:
        InvalidValueError: nothing is left to train on, or `fraction` holds nothing out.
    """
    if heldout is None:
        size = round(len(exchanges) * fraction) if 0 < fraction < 1 else 0
        if not 0 < size < len(exchanges):
            raise InvalidValueError("heldout_fraction", fraction, f"some of the {len(exchanges)} exchanges, not all")
        chosen = np.random.default_rng(seed).choice(len(exchanges), size, replace=False)
        heldout = [exchanges[i] for i in sorted(chosen)]
    questions, answers = {e.question for e in heldout}, {e.answer for e in heldout}
    training = [e for e in exchanges if e.question not in questions and e.answer not in answers]
    if not training:
        raise InvalidValueError("data", f"{len(exchanges)} exchanges", "some that share no text with the held-out ones")
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

    A text that spells a special token gets the tokens of its characters.
    """
    questions, answers = (
        tokenizer(texts, add_special_tokens=False, split_special_tokens=True).input_ids
        for texts in ([e.question for e in exchanges], [e.answer for e in exchanges])
    )
    for question, answer in zip(questions, answers, strict=True):
        yield [USER, *question, ASSISTANT], [*answer, END]


def packed_rows(documents: SequenceOf[list[int]], context: int, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Endless (tokens, positions) rows of `context` tokens; every epoch has its own order.

    Best-fit packing: a row takes the longest waiting document that fits until none does, and the rest is padding (5% of
    the bundled model's data). So documents stay whole, apart from what is longer than a row. Positions start again at 0
    with each document and are 0 on padding.
    """
    epochs = (np.random.default_rng((seed, epoch)).permutation(len(documents)) for epoch in count())
    stream = (documents[i][:context] for order in epochs for i in order)
    waiting = sorted(islice(stream, _PACKING_POOL), key=len)
    while True:
        tokens: list[int] = []
        positions: list[int] = []
        while (place := bisect_right(waiting, context - len(tokens), key=len)) > 0:
            document = waiting.pop(place - 1)
            tokens += document
            positions += range(len(document))
            insort(waiting, next(stream), key=len)
        padding = context - len(tokens)
        yield tokens + [PAD] * padding, positions + [0] * padding
