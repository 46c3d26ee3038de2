"""Which runners and weights may be asked for, and which of them together. No torch: checked before it is imported."""

from __future__ import annotations

from draftwood_model_runner.errors import InvalidValueError

RUNNERS = ("auto", "cuda", "openvino", "torch")
WEIGHTS = ("as-is", "int8", "int4")
"""Those after the first are quantized, by runner openvino."""


def check_runner(runner: str, exact: bool | None) -> None:
    """Raises InvalidValueError for a runner that does not exist, or that lacks the exact mode asked for."""
    if runner not in RUNNERS:
        raise InvalidValueError("runner", runner, f"it must be one of {', '.join(RUNNERS)}")
    if runner == "openvino" and exact:
        raise InvalidValueError("exact", exact, "the openvino runner has no exact mode; use runner torch")


def check_weights(weights: str, runner: str, exact: bool | None) -> None:
    """Raises InvalidValueError for weights that do not exist, or that no runner has with the other choices."""
    if weights not in WEIGHTS:
        raise InvalidValueError("weights", weights, f"it must be one of {', '.join(WEIGHTS)}")
    if weights != "as-is" and runner in ("cuda", "torch"):
        raise InvalidValueError(
            "weights", weights, f"it must be as-is with runner {runner}; {weights} needs runner openvino"
        )
    if weights != "as-is" and exact:
        raise InvalidValueError("weights", weights, f"it must be as-is in exact mode; {weights} needs runner openvino")
