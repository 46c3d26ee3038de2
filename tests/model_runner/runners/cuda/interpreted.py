"""Makes the CUDA runner ready for a CPU: kernels are interpreted, and steps recorded in place of CUDA graphs."""

from __future__ import annotations

from functools import partial

from draftwood_model_runner.runners.cuda.device.launching import require_triton
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.interpreting import patch_interpreter


def interpret() -> None:
    """For this process; may be called again.

    Raises:
        UnsupportedRunnerError: Triton is missing, or was imported to compile.
    """
    require_triton(DEVICE)
    if DEVICE.type == "cpu":
        # Kernels, which Triton must have been told to interpret.
        from draftwood_model_runner.runners.cuda.steps.graphs import CAPTURES
        from tests.model_runner.runners.cuda.recording import Recording

        patch_interpreter()
        CAPTURES["cpu"] = lambda forward: partial(Recording, forward)
