"""The model of a benchmark: the bundled one or the user's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftwood_benchmarks.harness.report import BenchmarkError, console
from draftwood_benchmarks.peers.process import ENVIRONMENTS
from draftwood_memory.settings import cache_folder
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.loading.sources import resolve

if TYPE_CHECKING:
    from draftwood_client import ModelInfo
    from draftwood_model_runner.loading.model import LoadedModel


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The model, and the device that it runs on."""

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
    """

    name: str
    path: str
    options: ModelOptions

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


def choose_model(options: ModelOptions) -> ChosenModel:
    """The model of the options. Raises ModelNotFoundError, UnsupportedModelError."""
    if options.model is None:
        return ChosenModel("bundled model", BUNDLED_MODEL, options)
    with console.status(f"Preparing {options.model}"):
        return ChosenModel(options.model, resolve(options.model, cache_folder(os.environ), os.environ), options)


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
