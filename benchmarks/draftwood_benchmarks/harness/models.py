"""The model of a benchmark: the bundled one, the bundled one grown to a larger shape, or the user's own.

A grown model is written to a temporary folder, from which transformers, our engine and a service load it in their
usual ways.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftwood_benchmarks.harness.report import console
from draftwood_memory.settings.memory_settings import cache_folder
from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.loading.sources.resolution import resolve

if TYPE_CHECKING:
    from draftwood_benchmarks.harness.widen import Shape
    from draftwood_client import ModelInfo
    from draftwood_model_runner.loading.model import LoadedModel

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, and the device that it runs on."""

    shape: Annotated[
        str,
        typer.Option(
            metavar="SHAPE",
            help="native, 110m, 400m, 1b, 7b, hybrid-100m (as Qwen3-Next) or HxLxHEADSxINTER: the bundled model grown"
            " to this shape. A forward pass costs as much as that of any model of the shape; the text stays the same.",
        ),
    ] = "native"
    vocabulary: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="The bundled model grown to so many tokens, such as 151936. None of the added ones is ever the most"
            " probable, so the text stays the same.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Folder, GGUF file, hub id or name of another model.",
        ),
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
        Literal["as-is", "int8", "int4"],
        typer.Option(
            metavar="WEIGHTS",
            help="as-is, or int8 or int4: quantized to 8 or 4 bits, by runner openvino and by the peer openvino-genai.",
        ),
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
        same_text: it is the bundled model grown to a shape only, and writes what that writes.
    """

    name: str
    path: str
    options: ModelOptions
    same_text: bool = False

    def load(self) -> LoadedModel:
        """The model as our engine runs it. Raises ModelNotFoundError, UnsupportedModelError, InvalidValueError."""
        from draftwood_model_runner.loading.model import load_model

        of = self.options
        return load_model(self.path, device=of.device, dtype=of.dtype, runner=of.runner, weights=of.weights)

    def load_small(self) -> LoadedModel:
        """The bundled model, for what a model of the same text need not do itself."""
        from draftwood_model_runner.loading.model import BUNDLED_MODEL

        options = replace(self.options, shape="native", runner="auto")
        return ChosenModel("bundled model", BUNDLED_MODEL, options).load()

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
def chosen_model(options: ModelOptions, positions: int | None = None) -> Iterator[ChosenModel]:
    """The model of the options; a grown model is deleted when the context ends.

    Args:
        positions: that the bundled model shall grow to; None for its own.

    Raises:
        InvalidValueError: the bundled model cannot grow to the shape or the vocabulary.
        InvalidInputError: a shape or a vocabulary is given together with another model.
        ModelNotFoundError, UnsupportedModelError: there is no such model, or it cannot be read.
    """
    with console.status("Loading torch"):
        from draftwood_benchmarks.harness.widen import parse_shape
        from draftwood_model_runner.loading.model import BUNDLED_MODEL
    shape = parse_shape(options.shape)
    if options.model is not None:
        for name, value in (("shape", shape and options.shape), ("vocabulary", options.vocabulary)):
            if value is not None:
                raise InvalidInputError(name, value, "only the bundled model can be grown; leave --model out")
        with console.status(f"Preparing {options.model}"):
            path = resolve(options.model, cache_folder(os.environ), os.environ)
        yield ChosenModel(options.model, path, options)
        return
    if shape is None and options.vocabulary is None and positions is None:
        yield ChosenModel("bundled model", BUNDLED_MODEL, options)
        return
    with TemporaryDirectory(prefix="draftwood-") as folder:
        name = f"shape {options.shape}" + ("" if options.vocabulary is None else f", {options.vocabulary:,} tokens")
        with console.status(f"Growing the bundled model: {name}"):
            _write_grown(shape, options, Path(folder), positions)
        yield ChosenModel(name, folder, options, options.vocabulary is None and options.weights == "as-is")


def describe(chosen: ChosenModel, model: LoadedModel) -> str:
    """Name, size, data types, device and runner, for the title of a table."""
    return f"{describe_served(chosen, model)}, runner {model.runner_name}"


def describe_served(chosen: ChosenModel, model: LoadedModel | ModelInfo) -> str:
    """The same without the runner."""
    types = model.dtype if model.weights in ("", model.dtype) else f"{model.dtype} with {model.weights} weights"
    return f"{chosen.name}, {model.parameters / 1e6:,.0f}M parameters, {types}, {model.device}"


def synchronize(model: LoadedModel) -> None:
    """Waits until a GPU has finished, so that its time is measured with the work that caused it."""
    if model.device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(model.device)


def _write_grown(shape: Shape | None, options: ModelOptions, folder: Path, positions: int | None) -> None:
    """Writes the grown model and its tokenizer; "auto" is the dtype of the bundled checkpoint."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from draftwood_benchmarks.harness.widen import shape_of, widen
    from draftwood_model_runner.loading.model import BUNDLED_MODEL

    disable_progress_bar()
    small = LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype="auto")
    target = small.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    grown = widen(small.float(), shape or shape_of(small.config), target, where, positions, options.vocabulary)
    grown.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(folder)
