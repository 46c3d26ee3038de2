"""Kernels run by Triton's interpreter, which must be chosen before Triton is imported (`make test-gpu-sim` sets it)."""

from __future__ import annotations

import pytest

from draftwood_model_runner.errors import UnsupportedRunnerError
from tests.model_runner.runners.cuda.interpreting import interpret

try:
    interpret()
except UnsupportedRunnerError as error:
    pytest.skip(str(error), allow_module_level=True)
