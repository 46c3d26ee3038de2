"""Tests of bfloat16 in OpenVINO, which computes it with instructions for it alone."""

from __future__ import annotations

import pytest

from draftwood_model_runner.runners.openvino.factory import core

needs_bfloat16 = pytest.mark.skipif(
    "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
    reason="this CPU has no bfloat16 instructions",
)
