"""The model of a benchmark: the bundled one or the user's own, or either grown to a larger shape.

A grown model is written to a temporary folder, from which transformers, our engine and a service load it in their
usual ways.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftwood_benchmarks.harness.report import BenchmarkError, console
from draftwood_benchmarks.peers.process import ENVIRONMENTS
from draftwood_memory.settings import cache_folder
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.loading.sources import resolve

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
            help="native, 110m, 400m, 1b, 7b, 13b, 70b-layer, hybrid-100m (as Qwen3-Next) or HxLxHEADSxINTER: the model"
            " grown to this shape, if it is a Llama. A forward pass costs as much as that of any model of the shape;"
            " the text stays the same.",
        ),
    ] = "native"
    vocabulary: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="The model grown to so many tokens, such as 151936. None of the added ones is ever the most"
            " probable, so the text stays the same.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder, GGUF file, hub id or name of another model than the bundled one."),
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
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", show_default=False, help="A smaller model of the same vocabulary, which drafts."),
    ] = None
    draft_head: Annotated[
        str,
        typer.Option(
            metavar="HEAD", help="Folder of a draft head; mtp: the checkpoint's own module; auto: what there is; none."
        ),
    ] = "auto"
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
        same_text: it is a model grown to a shape only, and writes what that writes.
        small: folder or hub id of the model that it was grown from; "" if it was not.
    """

    name: str
    path: str
    options: ModelOptions
    same_text: bool = False
    small: str = ""

    def load(self) -> LoadedModel:
        """The model as our engine runs it. Raises ModelNotFoundError, UnsupportedModelError, InvalidValueError."""
        from draftwood_model_runner.loading.model import load_model

        of = self.options
        return load_model(
            self.path,
            device=of.device,
            dtype=of.dtype,
            runner=of.runner,
            weights=of.weights,
            draft_model=self.draft_path,
            draft_head=of.draft_head,
        )

    def load_small(self) -> LoadedModel:
        """The model that it was grown from, for what a model of the same text need not do itself."""
        options = replace(self.options, shape="native", runner="auto", draft_head="none", draft_model=None)
        return ChosenModel("small model", self.small, options).load()

    @property
    def draft_path(self) -> str | None:
        """Folder or hub id of the model that drafts. Raises ModelNotFoundError, UnsupportedModelError."""
        draft = self.options.draft_model
        return None if draft is None else resolve(draft, cache_folder(os.environ), os.environ)

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
        flags += ["--runner", options.runner, "--weights", options.weights, "--draft-head", options.draft_head]
        flags += [] if options.draft_model is None else ["--draft-model", options.draft_model]
        return flags if options.threads is None else [*flags, "--threads", str(options.threads)]


@contextmanager
def chosen_model(options: ModelOptions, positions: int | None = None) -> Iterator[ChosenModel]:
    """The model of the options; a grown model is deleted when the context ends.

    Args:
        positions: that a grown model shall accept; None for those of the small one.

    Raises:
        InvalidValueError: the model cannot grow to the shape or the vocabulary.
        InvalidInputError: a shape or a vocabulary is given for a model that is no Llama.
        ModelNotFoundError, UnsupportedModelError: there is no such model, or it cannot be read.
    """
    with console.status("Loading torch"):
        from draftwood_benchmarks.harness.widen import parse_shape
        from draftwood_model_runner.loading.model import BUNDLED_MODEL
    shape = parse_shape(options.shape)
    path, kind = BUNDLED_MODEL, options.model or "bundled model"
    if options.model is not None:
        with console.status(f"Preparing {kind}"):
            path = resolve(options.model, cache_folder(os.environ), os.environ)
    grows = shape is not None or options.vocabulary is not None
    if not grows and (options.model is not None or positions is None):
        yield ChosenModel(kind, path, options)
        return
    with TemporaryDirectory(prefix="draftwood-") as folder:
        name = f"shape {options.shape}" + ("" if options.vocabulary is None else f", {options.vocabulary:,} tokens")
        name = name if options.model is None else f"{options.model}, {name}"
        with console.status(f"Growing the {kind}: {name}"):
            _write_grown(path, shape, options, Path(folder), positions)
        yield ChosenModel(name, folder, options, options.vocabulary is None and options.weights == "as-is", path)


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


def _write_grown(path: str, shape: Shape | None, options: ModelOptions, folder: Path, positions: int | None) -> None:
    """Writes a grown model and its tokenizer; "auto" is the dtype of the small checkpoint.

    Raises:
        InvalidInputError: the small model is no Llama, which alone can be grown.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from draftwood_benchmarks.harness.widen import shape_of, widen

    disable_progress_bar()
    if (kind := AutoConfig.from_pretrained(path).model_type) != "llama":
        named, value = ("--vocabulary", options.vocabulary) if shape is None else ("--shape", options.shape)
        raise InvalidInputError(named, value, f"only a Llama can be grown, and {path} is of type {kind}")
    small = LlamaForCausalLM.from_pretrained(path, dtype="auto")
    target = small.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    grown = widen(small.float(), shape or shape_of(small.config), target, where, positions, options.vocabulary)
    grown.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)


def check_strategies(names: Iterable[str]) -> None:
    """Raises InvalidValueError: there is no strategy of one of the names."""
    from draftwood_strategies import strategy_names

    for name in names:
        if name not in strategy_names():
            raise InvalidValueError("strategy", name, f"it must be one of {', '.join(strategy_names())}")


EngineName = Literal["draftwood", "vllm"]


def server_on(engine: EngineName, chosen: ChosenModel, *, eager: bool = False) -> tuple[list[str], dict[str, Any]]:
    """Flags of `draftwood serve` for a model, and further arguments of `server_process`.

    Args:
        eager: vLLM does not compile the model, which takes a minute: where its speed is not what is measured.

    Raises:
        BenchmarkError: vLLM is not installed.
    """
    if engine == "draftwood":
        return chosen.server_flags, {"python": sys.executable, "environment": {}}
    python = ENVIRONMENTS / "vllm" / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(f"{python} is missing; run `make peers` in the repository")
    flags = ["--engine", "vllm", "--model", chosen.path, "--dtype", chosen.options.dtype]
    flags += ["--engine-args", '{"enforce_eager": true}'] if eager else []
    environment = {}
    if chosen.options.threads is not None:
        # Bound to cores, several replicas on one machine would share some and leave others.
        environment = {"OMP_NUM_THREADS": str(chosen.options.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return flags, {"python": str(python), "environment": environment}
