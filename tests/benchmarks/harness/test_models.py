"""The model of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood_benchmarks.harness.models import Dtype, ModelOptions, chosen_model, describe
from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL


@pytest.mark.parametrize(
    ("shape", "dtype"), [("native", "bfloat16"), ("native", "float32"), ("320x7x5x768", "bfloat16")]
)
def test_transformers_and_our_engine_compute_in_the_same_dtype(shape: str, dtype: Dtype) -> None:
    """Whatever the dtype of our KV cache: otherwise the two could not be compared."""
    with chosen_model(ModelOptions(shape=shape, dtype=dtype, device="cpu")) as chosen:
        ours = chosen.load()
        plain = chosen.load_plain(ours)
    assert ours.dtype == dtype
    assert {parameter.dtype for parameter in plain.parameters()} == {getattr(torch, dtype)}
    assert sum(parameter.numel() for parameter in plain.parameters()) == ours.parameters
    assert dtype in describe(chosen, ours)


def test_the_vocabulary_and_the_positions_grow_without_a_shape() -> None:
    options = ModelOptions(vocabulary=6000, device="cpu", runner="torch")
    with chosen_model(options, positions=4096) as chosen:
        loaded = chosen.load()
    assert (loaded.vocab_size, loaded.max_context) == (6000, 4096)
    assert "6,000 tokens" in describe(chosen, loaded)


@pytest.mark.parametrize(("named", "options"), [("--shape", {"shape": "110m"}), ("--vocabulary", {"vocabulary": 9000})])
def test_only_a_llama_grows(tmp_path: Path, named: str, options: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    wanted = ModelOptions(model=str(tmp_path), **options)
    with pytest.raises(InvalidInputError, match=f"{named}.*only a Llama can be grown"), chosen_model(wanted):
        pass


def test_another_llama_than_the_bundled_one_grows() -> None:
    options = ModelOptions(model=BUNDLED_MODEL, shape="320x7x5x768", device="cpu", runner="torch")
    with chosen_model(options) as chosen:
        assert chosen.load().parameters > chosen.load_small().parameters
        assert chosen.small == BUNDLED_MODEL
    own = ModelOptions(model=BUNDLED_MODEL, device="cpu")
    with chosen_model(own, positions=4096) as chosen:
        assert chosen.path == BUNDLED_MODEL, "positions alone are of the bundled model"


def test_a_grown_model_is_gone_when_it_is_no_longer_needed() -> None:
    with chosen_model(ModelOptions(shape="320x7x5x768", threads=1)) as chosen:
        folder = Path(chosen.path)
        assert (folder / "model.safetensors").is_file()
        assert (folder / "tokenizer.json").is_file()
        assert chosen.server_flags == [
            "--model", str(folder), "--device", "auto", "--dtype", "auto", "--runner", "auto", "--weights", "as-is",
            "--threads", "1",
        ]  # fmt: skip
    assert not folder.exists()
