"""From exchanges, pairs of a question and its answer, to rows of token ids: tokenizer with chat template, packing.

No torch here: tokenizers and lists of token ids only.
"""

from __future__ import annotations

import json
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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
Exchange = tuple[str, str]


def read_exchanges(path: Path) -> list[Exchange]:
    """Of a file of JSON lines with `instruction` and `response`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(row["instruction"], row["response"]) for row in rows]


def without(exchanges: Sequence[Exchange], heldout: Sequence[Exchange]) -> list[Exchange]:
    """Those that share neither their question nor their answer with one that is held out."""
    questions, answers = {question for question, _ in heldout}, {answer for _, answer in heldout}
    return [(question, answer) for question, answer in exchanges if question not in questions and answer not in answers]


def trained_tokenizer(exchanges: Sequence[Exchange], vocab_size: int) -> PreTrainedTokenizerFast:
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
    bpe.train_from_iterator((text for exchange in exchanges for text in exchange), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=SPECIAL_TOKENS[USER],
        eos_token=SPECIAL_TOKENS[END],
        pad_token=SPECIAL_TOKENS[PAD],
        model_max_length=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def encoded(tokenizer: Any, exchanges: Sequence[Exchange]) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer) token ids of each exchange: `<|user|>question<|assistant|>` and `answer<|end|>`.

    A special token spelled in a text is encoded as ordinary characters.
    """
    questions, answers = (
        tokenizer([*texts], add_special_tokens=False, split_special_tokens=True).input_ids
        for texts in zip(*exchanges, strict=True)
    )
    for question, answer in zip(questions, answers, strict=True):
        yield [USER, *question, ASSISTANT], [*answer, END]


def packed_rows(documents: Sequence[list[int]], context: int, seed: int) -> Iterator[tuple[list[int], list[int]]]:
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
