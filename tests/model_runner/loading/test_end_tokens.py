"""Answers end at the generation config's tokens, with a format too, whatever the tokenizer calls its end."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.model import BUNDLED_MODEL, load_model
from draftwood_model_runner.output import FinishReason
from draftwood_model_runner.request import GrammarKind, SamplingParams, StopParams
from draftwood_model_runner.sampling.grammar_compilation import Vocabulary
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.sequences import GREEDY, engine_of, finish_of, make_sequence, run

WARNING = "answers do not end at the tokenizer's end-of-sequence token, 3: the model's generation config names"
DIGITS = "[0-9]{4}"
OTHER, ANOTHER = 5, 9


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with other tokens in its generation config, in folders that are named after them."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    module = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    assert tokenizer.eos_token_id == 3
    path = tmp_path_factory.mktemp("checkpoints")
    for ids in ([OTHER], [OTHER, ANOTHER], [3, OTHER], None):
        module.generation_config.eos_token_id = ids
        module.save_pretrained(path / str(ids))
        tokenizer.save_pretrained(path / str(ids))
    return path


@functools.cache
def loaded(path: Path) -> LoadedModel:
    return load_model(str(path), runner="torch", max_context=128, threads=1)


def answer(
    model: LoadedModel, text: str | None, sampling: SamplingParams = GREEDY, nodes: int = 8, min_tokens: int = 0
) -> tuple[Sequence, FinishReason]:
    grammar = None if text is None else model.grammars.compile(GrammarKind.REGEX, text)
    stop = StopParams(12, min_tokens=min_tokens)
    sequence = make_sequence("r", [1, 40, 50], stop, sampling, grammar=grammar, max_draft_nodes=nodes)
    return sequence, finish_of(run(engine_of(model, 8, max_running=1), sequence)).reason


@pytest.mark.parametrize("nodes", [0, 8])
@pytest.mark.parametrize("ids", [[OTHER], [OTHER, ANOTHER], [3, OTHER]])
def test_a_format_ends(checkpoints: Path, ids: list[int], nodes: int) -> None:
    model = loaded(checkpoints / str(ids))
    assert model.eos_token_ids == frozenset(ids)
    assert model.tokenizer.vocabulary(model.vocab_size, model.eos_token_ids).eos == tuple(ids)  # its own first
    sequence, reason = answer(model, DIGITS, nodes=nodes)
    assert reason is FinishReason.STOP
    assert sequence.output[-1] in ids
    text = model.tokenizer.decode(sequence.output[:-1])
    assert len(text) == 4
    assert text.isdigit()


def test_a_format_may_end_at_any_of_several_tokens(checkpoints: Path) -> None:
    """Where it may go on as well, the model's own choice among them counts."""
    model = loaded(checkpoints / str([OTHER, ANOTHER]))
    for end in (OTHER, ANOTHER):
        sampled = SamplingParams(temperature=1.0, seed=1, logit_bias=((end, 50.0), (3, 100.0)))
        sequence, reason = answer(model, "[0-9]{1,4}", sampled)
        assert (sequence.output[-1], reason) == (end, FinishReason.STOP)


def test_the_least_number_of_tokens_counts_the_same_ends(checkpoints: Path) -> None:
    model = loaded(checkpoints / str([OTHER]))
    sampled = SamplingParams(temperature=1.0, seed=1, logit_bias=((OTHER, 100.0),))
    assert answer(model, None, sampled)[0].output == [OTHER]
    sequence, reason = answer(model, None, sampled, min_tokens=5)
    assert reason is FinishReason.STOP
    assert len(sequence.output) == 6


def test_a_library_that_knows_one_end_gets_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As llguidance before 1.7."""
    taken: list[object] = []

    def old(definition: str, n_vocab: int, eos_token: object) -> SimpleNamespace:
        taken.append(eos_token)
        if isinstance(eos_token, list):
            raise TypeError("'list' object cannot be interpreted as an integer")
        return SimpleNamespace(vocab_size=n_vocab)

    monkeypatch.setattr("draftwood_model_runner.sampling.grammar_compilation.llguidance.LLTokenizer", old)
    for ends in ((3, OTHER), (OTHER,)):
        Vocabulary("{}", 10, ends).load()
    assert taken == [[3, OTHER], 3, OTHER]


@pytest.mark.parametrize(("ids", "named"), [([OTHER, ANOTHER], ["5, 9"]), (None, ["none"]), ([3, OTHER], [])])
def test_another_end_of_the_tokenizer_is_logged_once(
    checkpoints: Path, tmp_path: Path, ids: list[int] | None, named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the converted model comes from the cache."""
    for _ in range(2):
        caplog.clear()
        load_model(str(checkpoints / str(ids)), max_context=128, threads=1, cache=tmp_path / "cache")
        warnings = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
        assert warnings == [f"{WARNING} {ends}" for ends in named]
