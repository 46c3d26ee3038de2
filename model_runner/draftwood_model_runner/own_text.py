"""What the model writes by itself, for no tenant, as a table of successors that all tenants draft from. No torch.

A tenant's first answers find its own table empty. So the model writes some texts without a question, sampled at
temperature 1 from the beginning of its chat template on (as Magpie, arXiv 2406.08464, makes training data), and its
most probable tokens at each of their positions are kept. That contains nothing that any tenant wrote.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import numpy as np

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.native import Int32Array
from draftwood_strategies.successors import NOWHERE, ORDERS, WIDTH, SuccessorTable, has_layout

_TENANT = "\x00own text"
"""No caller can have this name."""
_TEXT_TOKENS = 160
"""Of each text, at most."""
_CONTEXTS = 1 << 16
"""Of the table, at most: rows of 44 bytes, 2.9 MB."""

_log = logging.getLogger(__name__)


def own_text_successors(engine: Engine, tokens: int, cache: Path | None) -> Int32Array:
    """The rows of the table, int32[r, COLUMNS], from some tokens of text: read from the file in `cache`, or computed
    while the engine has no other work, and written there.

    A file that is damaged or cannot be written is logged.
    """
    file = None if cache is None else cache / f"own-text-{engine.model.fingerprint}-{tokens}.npy"
    if file is not None and file.exists():
        try:
            return _read(file, engine.model.vocab_size)
        except (OSError, ValueError, EOFError, MemoryError) as error:
            _log.warning("the model's own text in %s is not used: %s", file, error)
    table = SuccessorTable(_CONTEXTS)
    for text in _write_texts(engine, tokens):
        top_tokens = engine.top_tokens(text, WIDTH)
        tail: Int32Array = np.full(ORDERS, NOWHERE, np.int32)
        tail[-1] = text[0]
        table.note(tail, text, np.arange(-1, text.size - 1, dtype=np.int32), top_tokens)
    if file is not None:
        try:
            _save(file, table.rows)
        except OSError as error:
            _log.warning("the model's own text was not kept: %s", error)
    return table.rows


def _write_texts(engine: Engine, tokens: int) -> list[Int32Array]:
    """Texts of that many tokens together or a few more, int32[n] each with their beginning."""
    beginning = _beginning(engine.model.tokenizer)
    length = min(_TEXT_TOKENS, engine.model.max_context - beginning.size - 1)
    if length < 1:
        return []
    sequences = [
        Sequence(
            Request(
                request_id=f"own-text-{seed}",
                prompt=beginning,
                stop=StopParams(max_tokens=length, ignore_eos=True),
                sampling=SamplingParams(temperature=1.0, seed=seed),
                tenant=_TENANT,
            )
        )
        for seed in range(-(-tokens // length))
    ]
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            if output.finish is not None and output.finish.error is not None:
                raise output.finish.error
    return [np.concatenate([beginning, np.array(sequence.output, np.int32)]) for sequence in sequences]


def _beginning(tokenizer: Tokenizer) -> Int32Array:
    """int32[b], b >= 1: what precedes a question in the chat template; else how the tokenizer begins a text."""
    if tokenizer.has_chat_template:
        try:
            one, other = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("a", "7"))
        except InvalidValueError:
            one = other = np.empty(0, np.int32)
        common = min(one.size, other.size)
        differs = np.flatnonzero(one[:common] != other[:common])
        if differs.size and differs[0]:
            return one[: differs[0]]
    return tokenizer.encode("\n")[:1] if tokenizer.encode("\n").size else np.zeros(1, np.int32)


def _read(file: Path, vocab_size: int) -> Int32Array:
    """The rows in a file.

    Raises:
        OSError, ValueError, EOFError, MemoryError: it cannot be read, or contains other things.
    """
    rows: Int32Array = np.load(file, allow_pickle=False)
    if not has_layout(rows):
        raise ValueError("it is no table of successors")
    if rows[:, :WIDTH].min() < 0 or rows[:, :WIDTH].max() >= vocab_size:
        raise ValueError("it has tokens that the model does not have")
    return rows


def _save(file: Path, rows: Int32Array) -> None:
    """Writes a file as a whole."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
        try:
            np.save(part, rows)
            part.close()
            os.replace(part.name, file)
        except BaseException:
            os.unlink(part.name)
            raise
