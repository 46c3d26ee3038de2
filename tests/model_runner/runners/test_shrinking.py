"""Fields of configs that count tokens, beyond which a model computes something else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoConfig

from draftwood_model_runner.runners.shrinking import THRESHOLD_FIELDS, shrunken_config, thresholds
from tools.model_sweep.families import FAMILIES, NO_TEXT

LIKE_A_THRESHOLD = re.compile(
    r"window(_size)?$|index_topk$|block_size$|(attention|attn)_chunk_size$|floor(_scale)?$|original_max_position_embeddings$"
)
NO_THRESHOLDS = {"weight_block_size"}
"""Of quantized weights."""


def fields(values: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from fields(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key


@pytest.mark.parametrize("model_type", sorted({*FAMILIES} - {*NO_TEXT}))
def test_each_field_that_looks_like_a_threshold_is_known(model_type: str) -> None:
    """A newer version of transformers may bring others, which would not be tried."""
    config = AutoConfig.for_model(model_type).get_text_config()
    names = {name for name in fields(config.to_dict()) if LIKE_A_THRESHOLD.search(name)}
    assert names <= THRESHOLD_FIELDS | NO_THRESHOLDS


def test_thresholds_within_the_context_are_scaled_down() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=4096)
    assert thresholds(config, 32_768) == {"sliding_window": 4096}
    assert thresholds(config, 4096) == {}
    assert shrunken_config(config, threshold=12).sliding_window == 12


@pytest.mark.skipif("dory" not in FAMILIES, reason="this version of transformers has no looped layers")
def test_layers_that_are_run_several_times_stay() -> None:
    dory = shrunken_config(AutoConfig.for_model("dory"))
    assert (dory.n_input_layers, dory.n_recurrent_layers, dory.n_output_layers, dory.n_recurrent_loops) == (1, 2, 1, 2)
    assert {*dory.layer_types} == {"sliding_attention", "full_attention"}
    inkling = shrunken_config(AutoConfig.for_model("inkling2_loop_text"))
    assert (inkling.loop_layer_index_start, inkling.loop_layer_index_end) == (1, inkling.num_hidden_layers - 1)
    assert inkling.loop_num_passes == 3
