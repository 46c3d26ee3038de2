"""What an engine cannot do is refused with one typed error, and shown by GetModelInfo."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood_client import Client, InvalidRequestError
from tests.engines.servers import Served


def test_the_engine_is_shown(client: Client, served: Served) -> None:
    info = client.model_info()
    assert info.abilities.engine == served.engine
    assert (info.runner == "vllm") == (served.engine == "vllm")
    assert bool(info.abilities.version) == (served.engine == "vllm")
    assert info.architecture == "LlamaForCausalLM"
    assert (info.dtype, info.exact) == ("float32", False)
    assert info.abilities.draft_trees == (served.engine == "draftwood")
    assert info.default_strategy == ("trie" if served.engine == "vllm" else "hybrid")


@pytest.mark.parametrize(
    ("options", "field", "ability"),
    [
        ({"min_p": 0.1, "temperature": 1.0}, "sampling.min_p", "min_p"),
        ({"logit_bias": {5: 2.0}}, "sampling.logit_bias", "logit_bias"),
        ({"temperature": 3.0}, "sampling.temperature", "max_temperature"),
        ({"presence_penalty": 3.0}, "sampling.presence_penalty", "max_penalty"),
        ({"frequency_penalty": -3.0}, "sampling.frequency_penalty", "max_penalty"),
        ({"draft_trees": True}, "output.draft_trees", "draft_trees"),
    ],
)
def test_what_the_engine_cannot_do(client: Client, options: Any, field: str, ability: str) -> None:
    info = client.model_info()
    able = getattr(info.abilities, ability)
    if able is True or (isinstance(able, float) and able >= 3.0):
        assert client.generate("x", max_tokens=3, **options).token_ids
        return
    with pytest.raises(InvalidRequestError) as error:
        client.generate("x", max_tokens=3, **options)
    assert error.value.reason == "UNSUPPORTED_BY_ENGINE"
    assert error.value.violations[0].field == field
    assert f"engine {info.abilities.engine}" in str(error.value)


def test_min_p_of_a_greedy_request_changes_nothing(client: Client) -> None:
    assert client.generate("x", max_tokens=3, min_p=0.1).token_ids == client.generate("x", max_tokens=3).token_ids
