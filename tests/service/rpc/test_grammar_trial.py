"""Grammars that take too much are refused, and the next one is tried as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood_model_runner.errors import FormatsUnavailableError, InvalidInputError, InvalidValueError
from draftwood_model_runner.request import GrammarKind
from draftwood_model_runner.sampling.grammar_compilation import Vocabulary
from draftwood_service.rpc import grammar_trial
from draftwood_service.rpc.grammar_trial import GrammarTrials
from tests.model_runner.families import served


@contextmanager
def made() -> Iterator[GrammarTrials]:
    model = served("bundled")
    trials = GrammarTrials(model.tokenizer.vocabulary(model.vocab_size, model.eos_token_ids))
    yield trials
    trials.close()


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    with made() as trials:
        yield trials


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarTrials]:
    """Those of several tests."""
    with made() as trials:
        yield trials


def multiple_of(number: int) -> str:
    return json.dumps({"type": "integer", "multipleOf": number})


def test_what_takes_too_long_is_refused_and_the_next_one_is_tried(trials: GrammarTrials) -> None:
    trials.check(GrammarKind.JSON_SCHEMA, multiple_of(7))
    # Its compilation takes more and more of both: the machine decides which limit comes first.
    with pytest.raises(InvalidInputError, match=r"CPU time|256 MiB") as caught:
        trials.check(GrammarKind.JSON_SCHEMA, multiple_of(9_999_991))
    assert caught.value.field == "format.json_schema"
    trials.check(GrammarKind.REGEX, "[a-z]+")
    with pytest.raises(InvalidValueError, match="not a valid regular expression"):
        trials.check(GrammarKind.REGEX, "(a")


def test_the_first_grammar_is_tried_in_the_process_that_was_prepared(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    starting = grammar_trial._Trial.__init__

    def counted(trial: grammar_trial._Trial, vocabulary: Vocabulary) -> None:
        started.append(trial)
        starting(trial, vocabulary)

    monkeypatch.setattr(grammar_trial._Trial, "__init__", counted)
    trials.prepare()
    for _ in range(2):
        trials.check(GrammarKind.REGEX, "[a-z]+")
    assert len(started) == 1


def test_a_process_that_could_not_start_is_replaced(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(trial: grammar_trial._Trial, vocabulary: Vocabulary) -> None:
        raise OSError("too many processes")

    with monkeypatch.context() as patched:
        patched.setattr(grammar_trial._Trial, "__init__", failing)
        trials.prepare()
        with pytest.raises(FormatsUnavailableError):
            trials.check(GrammarKind.REGEX, "[a-z]+")
    trials.check(GrammarKind.REGEX, "[a-z]+")


def test_a_process_that_ends_at_its_start_is_no_error_of_the_request(trials: GrammarTrials) -> None:
    broken = GrammarTrials(replace(trials._vocabulary, definition="no tokenizer"))
    with pytest.raises(FormatsUnavailableError, match="try again later"):
        broken.check(GrammarKind.REGEX, "[a-z]+")


def with_keys(pattern: str, *required: str) -> str:
    """A schema of an object with other keys than the property `a` by a pattern alone."""
    keys = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": required}
    return json.dumps({**keys, "patternProperties": {pattern: {"type": "string"}}, "additionalProperties": False})


RECURSIVE = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("kind", "grammar", "problem"),
    [
        (GrammarKind.LARK, 'start: "a" B\nB: /[a-z]/ & /[0-9]/', "where nothing is allowed"),
        (GrammarKind.LARK, 'start: "x" | "[" start "]" | "{" B\nB: /[a-z]/ & /[0-9]/', "where nothing is allowed"),
        (GrammarKind.LARK, 'start: "a" start', "is too complex"),
        (GrammarKind.REGEX, "[^\\x00-\\x{10ffff}]", "where nothing is allowed"),
        (GrammarKind.JSON_SCHEMA, json.dumps(RECURSIVE), "is too complex"),
        # The pattern's keys are all required: llguidance allows a comma behind the last one.
        (GrammarKind.JSON_SCHEMA, with_keys("^(a|b)$", "b"), "where nothing is allowed"),
        (GrammarKind.JSON_SCHEMA, with_keys("^[bc]$", "a", "b", "c"), "where nothing is allowed"),
    ],
)
def test_what_leads_to_where_nothing_is_allowed_is_refused_at_once(
    shared: GrammarTrials, kind: GrammarKind, grammar: str, problem: str
) -> None:
    with pytest.raises(InvalidInputError, match=rf"^format.{kind.value}: .*{problem}"):
        shared.check(kind, grammar)


@pytest.mark.parametrize(
    "schema",
    [
        json.dumps({"type": "object", "properties": {"a": {"$ref": "#"}}}),
        json.dumps({"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 3}),
        json.dumps({"type": "string", "pattern": "^[a-z]+@[a-z]+\\.com$", "maxLength": 40}),
        with_keys("^[bc]$", "b"),
        with_keys("^b", "b"),
    ],
)
def test_what_can_be_followed_is_not_refused(shared: GrammarTrials, schema: str) -> None:
    shared.check(GrammarKind.JSON_SCHEMA, schema)


KEYWORDS = [
    *("type", "properties", "patternProperties", "additionalProperties", "required", "items", "prefixItems", "enum"),
    *("const", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "multipleOf", "minItems"),
    *("maxItems", "anyOf", "allOf", "oneOf", "not", "if", "$ref", "$defs", "minProperties", "x-guidance"),
]
WORDS = ["object", "string", "integer", "array", "date-time", "^a", "a", "#", "#/$defs/a", "[", "(?=a)", ".*"]
VALUES: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 9) | st.floats() | st.sampled_from(WORDS) | st.text(max_size=3),
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), values, max_size=4)
    ),
    max_leaves=9,
)
SCHEMAS = st.dictionaries(st.sampled_from(KEYWORDS), VALUES, min_size=1, max_size=4).map(json.dumps)
PIECES = st.sampled_from([*'ab()[]{}|*+?.^$\\\n:/&~<>1,"', "start: ", "A: ", "[a-z]", "{2,3}", "%json ", "%ignore "])


@given(st.one_of(*(st.tuples(st.just(kind), SCHEMAS | st.lists(PIECES).map("".join)) for kind in GrammarKind)))
@settings(max_examples=30)
def test_any_format_passes_or_is_refused(shared: GrammarTrials, tried: tuple[GrammarKind, str]) -> None:
    with suppress(InvalidInputError):
        shared.check(*tried)


def test_what_takes_too_much_memory_is_refused(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial._Trial, "run", _with_little_memory)
    with pytest.raises(InvalidInputError, match="MiB"):
        trials.check(GrammarKind.JSON_SCHEMA, multiple_of(99_991))


def _with_little_memory(trial: grammar_trial._Trial, kind: GrammarKind, text: str) -> InvalidValueError | None:
    import resource

    pid = trial._process.pid
    resource.prlimit(pid, resource.RLIMIT_AS, (1, 1))
    trial._connection.send((kind, text))
    error: InvalidValueError | None = trial._connection.recv()
    return error
