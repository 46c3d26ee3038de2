"""What a step is given: masks and pages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.openvino.kv_pages import PAGE_SIZE
from draftwood_model_runner.runners.openvino.runner import step_inputs, tree_mask
from draftwood_strategies.draft import EMPTY_TREE

trees = st.integers(1, 12).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n))))


@given(st.lists(trees, min_size=1, max_size=4))
def test_a_token_sees_its_ancestors_and_itself(rows: list[tuple[int, ...]]) -> None:
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    mask, mask_offsets = tree_mask(np.array([parent for row in rows for parent in row], np.int32), offsets)
    for row, parents in enumerate(rows):
        of_row = mask[mask_offsets[row] : mask_offsets[row + 1]]
        if parents == tuple(range(-1, len(parents) - 1)):
            assert of_row.size == 0  # a chain
            continue
        expected = np.eye(len(parents), dtype=np.uint8)
        for i, parent in enumerate(parents):
            while parent >= 0:
                expected[i, parent] = 1
                parent = parents[parent]
        assert of_row.reshape(expected.shape).tolist() == expected.tolist()


def test_each_sequence_brings_its_page_table() -> None:
    three = np.arange(3, dtype=np.int32)
    batch = lay_out(
        [
            BatchRow(np.array([7, 4], np.int32), PAGE_SIZE - 2, three, EMPTY_TREE, logits_from=2),
            BatchRow(np.array([5], np.int32), 5, three[:1], EMPTY_TREE, logits_from=0),
        ]
    )
    inputs = step_inputs(batch)
    assert inputs["block_indices"].tolist() == [7, 4, 5]
    assert inputs["block_indices_begins"].tolist() == [0, 2, 3]
    assert inputs["past_lens"].tolist() == [PAGE_SIZE - 2, 5]
    assert inputs["max_context_len"] == PAGE_SIZE + 1
    assert inputs["logit_rows"].tolist() == [2, 3]
    assert inputs["input_ids"].shape == inputs["position_ids"].shape == (4, 1)
