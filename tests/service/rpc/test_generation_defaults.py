"""What a request does not set comes from the model's generation config, and GetModelInfo tells what that is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sampling.generation_defaults import Constraints, GenerationDefaults
from draftwood_service.rpc.model_info import model_info
from draftwood_service.rpc.requests import Prompt, read_samples, read_sampling, read_stop
from draftwood_service.serving import Serving
from draftwood_service.settings import Settings
from draftwood_tenants.config import TenantConfig
from tests.service.fakes import FakeModel

DEFAULTS = GenerationDefaults(
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
    min_tokens=3,
    max_tokens=300,
    constraints=Constraints(2, ((1, 2),), (3,), (4, 5), (6,)),
)
MODEL = FakeModel(defaults=DEFAULTS)
PROMPT = Prompt("text", np.zeros(10, np.int32))


def test_what_is_set_counts_and_the_rest_is_the_models() -> None:
    nothing = read_sampling(pb.GenerateRequest(), MODEL, TenantConfig())
    assert (nothing.temperature, nothing.top_k, nothing.top_p, nothing.repetition_penalty) == (0.7, 20, 0.8, 1.05)
    assert nothing.seed != read_sampling(pb.GenerateRequest(), MODEL, TenantConfig()).seed
    some = read_sampling(
        pb.GenerateRequest(sampling=pb.SamplingOptions(temperature=0, top_k=0, seed=9)), MODEL, TenantConfig()
    )
    assert (some.temperature, some.top_k, some.top_p, some.seed) == (0.0, 0, 0.8, 9)


def test_stop_conditions_have_defaults_within_the_context() -> None:
    def stop(model: FakeModel = MODEL, output_format: pb.OutputFormat | None = None, **options: Any) -> StopParams:
        return read_stop(pb.GenerateRequest(stop=pb.StopOptions(**options), format=output_format), model, PROMPT)

    assert (stop().max_tokens, stop().min_tokens) == (300, 3)
    assert (stop(max_tokens=2).max_tokens, stop(max_tokens=2).min_tokens) == (2, 2)
    assert stop(FakeModel(defaults=DEFAULTS, max_context=100), min_tokens=0).max_tokens == 90
    assert stop(FakeModel()).max_tokens == FakeModel().max_context - 10
    assert stop(output_format=pb.OutputFormat(regex="a")).min_tokens == 0  # the format says when the answer ends


def test_there_may_be_as_many_samples_as_slots() -> None:
    assert [read_samples(options, 8) for options in (pb.SamplingOptions(n=8), pb.SamplingOptions())] == [8, 1]
    for number in (0, 9):
        with pytest.raises(InvalidValueError, match=r"sampling\.n"):
            read_samples(pb.SamplingOptions(n=number), 8)


def test_model_info_tells_them() -> None:
    told = model_info(Serving(MODEL, Settings())).generation_defaults
    assert told.sampling.temperature == pytest.approx(0.7)
    assert (told.sampling.top_k, told.stop.max_tokens, told.stop.min_tokens) == (20, 300, 3)
    assert [list(words.ids) for words in told.constraints.bad_words] == [[1, 2]]
    constraints = told.constraints
    assert (constraints.no_repeat_ngram_size, list(constraints.suppressed_first)) == (2, [4, 5])
    assert not model_info(Serving(FakeModel(), Settings())).generation_defaults.stop.HasField("max_tokens")
