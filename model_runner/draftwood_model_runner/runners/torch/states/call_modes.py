"""How mixers take several tokens at once."""

from __future__ import annotations

from collections.abc import Iterator

from draftwood_model_runner.runners.states.mixers import Mixer


def call_modes(mixers: tuple[Mixer, ...]) -> Iterator[None]:
    """Sets how mixers take several tokens, one way after the other: the fastest first."""
    on_cpu = all(tensor.device.type == "cpu" for mixer in mixers for tensor in mixer.part.parameters())
    scanning = on_cpu and any(mixer.can_scan for mixer in mixers)
    limited = least_time_step(mixers) is not None
    for scans in (True, False) if scanning and not limited else (scanning,):
        for one_by_one in (False, True):
            for mixer in mixers:
                mixer.scans, mixer.one_by_one = scans and mixer.can_scan, one_by_one
            if scans or not limited:
                yield


def least_time_step(mixers: tuple[Mixer, ...]) -> str | None:
    """Why what transformers computes depends on how many tokens it is given at once, as in Zamba 2 and Nemotron H."""
    limits = (getattr(mixer.part, "time_step_limit", None) for mixer in mixers)
    least = max((float(limit[0]) for limit in limits if limit), default=0.0)
    if least == 0.0:
        return None
    return (
        f"transformers raises time steps of its state-space layers to {least:g} where it is given several tokens, and"
        " does not for one token, which is computed alike on CPUs only"
    )
