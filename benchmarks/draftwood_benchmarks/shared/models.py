"""The model of a benchmark: the bundled one, the bundled one grown to a larger shape, or the user's own.

A grown model is written to a temporary folder, from which transformers, our engine and a service load it in their
usual ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from draftwood_model_runner.errors import InvalidInputError

if TYPE_CHECKING:
    from draftwood_benchmarks.shared.widen import Shape
    from draftwood_model_runner.loading.model import LoadedModel

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, and the device that it runs on."""

    shape: Annotated[
        str,
        typer.Option(
            metavar="SHAPE",
            help="native, 110m, 400m, 1b, 7b or HxLxHEADSxINTER: the bundled model grown to this shape. A forward pass"
            " costs as much as that of any model of the shape, and the text stays the same.",
        ),
    ] = "native"
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Folder or hub id of another model, instead of a shape.")
    ] = None
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE", help="float32, bfloat16, float16 or auto: float32 on a CPU, else the dtype of the model."
        ),
    ] = "auto"
    runner: Annotated[
        Literal["auto", "cuda", "openvino", "torch"],
        typer.Option(
            metavar="RUNNER",
            help="cuda, openvino, torch or auto: cuda on GPUs and openvino on CPUs, for models that they support.",
        ),
    ] = "auto"
    weights: Annotated[
        Literal["as-is", "int8"],
        typer.Option(metavar="WEIGHTS", help="as-is or int8: quantized to 8 bits, by runner openvino and by peers."),
    ] = "as-is"
    threads: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="CPU threads of the model; all cores by default.")
    ] = None


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model in a folder or on the hub, and how it is loaded.

    Attributes:
        name: for tables.
        path: folder or hub id.
        options: as given by the user.
    """

    name: str
    path: str
    options: ModelOptions

    def load(self) -> LoadedModel:
        """The model as our engine runs it. Raises ModelNotFoundError, UnsupportedModelError, InvalidValueError."""
        from draftwood_model_runner.loading.model import load_model

        options = self.options
        return load_model(
            self.path,
            device=options.device,
            dtype=options.dtype,
            runner=options.runner,
            weights=options.weights,
        )

    def load_plain(self, like: LoadedModel) -> Any:
        """The model as transformers runs it, with the dtype and on the device of `like`."""
        from transformers import AutoModelForCausalLM

        module: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=like.dtype)
        return module.to(like.device).eval()

    @property
    def server_flags(self) -> list[str]:
        """Flags of `draftwood serve` for this model."""
        options = self.options
        flags = ["--model", self.path, "--device", options.device, "--dtype", options.dtype]
        flags += ["--runner", options.runner, "--weights", options.weights]
        return flags if options.threads is None else [*flags, "--threads", str(options.threads)]


@contextmanager
def chosen_model(options: ModelOptions, console: Console, positions: int | None = None) -> Iterator[ChosenModel]:
    """The model of the options; a grown model is deleted when the context ends.

    Args:
        positions: that a grown model accepts; None for those of the bundled one.

    Raises:
        InvalidValueError: the bundled model cannot grow to the shape.
        InvalidInputError: a shape is given together with another model.
    """
    with console.status("Loading torch"):
        from draftwood_benchmarks.shared.widen import parse_shape
        from draftwood_model_runner.loading.model import BUNDLED_MODEL
    shape = parse_shape(options.shape)
    if shape is None:
        yield ChosenModel(options.model or "bundled model", options.model or BUNDLED_MODEL, options)
        return
    if options.model is not None:
        raise InvalidInputError("shape", options.shape, "only the bundled model can be grown; leave --model out")
    with TemporaryDirectory(prefix="draftwood-") as folder:
        with console.status(f"Growing the bundled model to {shape}"):
            _write_grown(shape, options.dtype, Path(folder), positions)
        yield ChosenModel(f"shape {options.shape}", folder, options)


def describe(chosen: ChosenModel, model: LoadedModel) -> str:
    """Name, size, data types, device and runner, for the title of a table."""
    size, types = f"{model.parameters / 1e6:,.0f}M parameters", precision(model.dtype, model.weights)
    return f"{chosen.name}, {size}, {types}, {model.device}, runner {model.runner_name}"


def precision(dtype: str, weights: str) -> str:
    """The data types of a model, for the title of a table."""
    return dtype if weights in ("", dtype) else f"{dtype} with {weights} weights"


def synchronize(model: LoadedModel) -> None:
    """Waits until a GPU has finished, so that its time is measured with the work that caused it."""
    if model.device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(model.device)


def _write_grown(shape: Shape, dtype: Dtype, folder: Path, positions: int | None) -> None:
    """Writes the grown model and its tokenizer; "auto" is the dtype of the bundled checkpoint."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from draftwood_benchmarks.shared.widen import widen
    from draftwood_model_runner.loading.model import BUNDLED_MODEL

    disable_progress_bar()
    small = LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype="auto")
    target = small.dtype if dtype == "auto" else getattr(torch, dtype)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    widen(small.float(), shape, target, where, positions).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(folder)
