"""Takes a transformers model over for OpenVINO: converts it, checks what it computes, compiles it, keeps it in
files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import openvino as ov
import torch
from openvino import opset13 as ops

from draftwood_model_runner.errors import UnsupportedRunnerError
from draftwood_model_runner.runners.base import Runner
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.machine import default_capacity, default_threads
from draftwood_model_runner.runners.openvino.graph import ConvertedModel, pair_single_tokens, restore_heads
from draftwood_model_runner.runners.openvino.output_head import OutputHead, cut_at_head
from draftwood_model_runner.runners.openvino.pages import PAGE_SIZE, PageLayout
from draftwood_model_runner.runners.openvino.runner import OpenVinoRunner
from draftwood_model_runner.runners.openvino.weights import BITS, GROUP, keep_bfloat16, quantize_weights, restore_marks
from draftwood_model_runner.runners.trials import PATH, TOLERANCE, Stepper, Trial, difference
from draftwood_strategies.draft import EMPTY_TREE

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_ACTIVATION_GROUPS = {"float32": 0, "bfloat16": GROUP}
"""Activations that share a scale where a product with quantized weights rounds them to 8 bits; 0: they are not rounded.
docs/decisions/quantized-weights.md has the measurements: groups of 32 make a step of 32 tokens 1.2 times as long."""
_CPU = torch.device("cpu")

Float32Array = npt.NDArray[np.float32]
_CONTEXTS = (PAGE_SIZE + 9, PAGE_SIZE - 2 * PATH + 3)
"""Tokens of the two prompts: one is longer than a page, the tree of the other crosses the end of one."""
_KV_TOKENS = 4 * PAGE_SIZE
"""More than each needs."""
QUANTIZED_TOLERANCE = {"int8": 0.4, "int4": 0.4}
"""Largest `difference` that quantized weights explain: with int8 it is 0.02 to 0.13 on tiny random models and the
bundled one, 0.5 to 3.6 with scales or zero points of the next row or levels read as signed."""
_GRAPH, _WEIGHTS, _TRIAL = "model.xml", "model.bin", "trial.npy"
_GRAPH_BYTES = 16 << 20
"""The most bytes of graph and trial. They are 5 MB with 49,152 tokens and 11 MB with 151,936."""


@cache
def core() -> ov.Core:
    """The one `Core` of the process, which is never destroyed.

    Each `Core` gives the main thread a signal stack of its own and takes it back in its destructor, which leaves the
    thread with a freed one where they are not destroyed in the reverse order: the next signal, such as the watchdog's,
    then ends the process.
    """
    return ov.Core()


class OpenVinoRunnerFactory:
    """Implements `runners.base.RunnerFactory`.

    Args:
        threads: CPU threads of a step where a runner is asked for without; None for `default_threads`.
    """

    name: ClassVar[str] = "openvino"
    exact: ClassVar[bool] = False

    def __init__(self, converted: ConvertedModel, threads: int | None = None) -> None:
        self.converted = converted
        self._threads = threads
        self._compiled: tuple[int, ov.CompiledModel, OutputHead | None] | None = None

    @property
    def window(self) -> int | None:
        return self.converted.window if self.converted.in_every_layer else None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.converted.feature_layers

    @property
    def kv_bytes_per_token(self) -> int:
        return self.converted.layout.bytes_per_token

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        return default_capacity(self.converted.layout.bytes_per_token, _CPU, context, sequences)

    def runner(self, kv_tokens: int, threads: int | None = None, sequences: int | None = None) -> OpenVinoRunner:
        """Compiles the model again if the last runner had another number of threads; weights are held once for each
        number that a live runner has."""
        threads = threads or self._threads or default_threads()
        _, layout, window, *_ = self.converted
        if self._compiled is None or self._compiled[0] != threads:
            self._compiled = None  # the weights of the last one are freed first, if no runner has them
            self._compiled = threads, *self._compile(threads)
        _, compiled, head = self._compiled
        return OpenVinoRunner(compiled, layout, window, kv_tokens, threads, head)

    def _compile(self, threads: int) -> tuple[ov.CompiledModel, OutputHead | None]:
        """The model and None, or its body and its head if that is large."""
        model, dtype = self.converted.model, self.converted.layout.dtype
        cut = cut_at_head(model, dtype)
        if cut is None:
            return _compile(model, dtype, threads), None
        compile_head = partial(_compile, dtype=dtype, threads=threads, activation_group=GROUP)
        return _compile(cut.body, dtype, threads), OutputHead(cut.head, cut.weights, compile_head, threads)


def take_over(
    module: Any,
    max_context: int,
    *,
    weights: str = "as-is",
    threads: int | None = None,
    feature_layers: tuple[int, ...] = (),
) -> OpenVinoRunnerFactory:
    """Converts a model, and checks what it computes then. Keeps nothing of the module but its weights.

    Args:
        module: an unmodified transformers model on a CPU; is left as it was.
        max_context: positions that it will be run on at most.
        weights: "as-is", or one of `weights.BITS` to quantize them.
        threads: as for `OpenVinoRunnerFactory`.
        feature_layers: see `loading.loaded.adopt`.

    Raises:
        UnsupportedRunnerError: the model cannot be converted or quantized, or computes something else then; with the
            reason.
    """
    # Imports the modelling code of transformers, which a model that is read from a file does without.
    from draftwood_model_runner.runners.openvino.conversion import convert

    dtype = str(module.dtype).removeprefix("torch.")
    if dtype not in _PRECISIONS:
        raise UnsupportedRunnerError(f"OpenVINO: dtype {dtype} is not supported; use float32 or bfloat16")
    if dtype == "bfloat16" and "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise UnsupportedRunnerError("OpenVINO: this CPU has no bfloat16 instructions; use float32")
    converted = convert(module, max_context, feature_layers)
    if weights in BITS:
        quantize_weights(converted.model, BITS[weights])
        if dtype == "bfloat16":
            pair_single_tokens(converted.model)
    elif dtype == "bfloat16":
        keep_bfloat16(converted.model)
    factory = OpenVinoRunnerFactory(converted, threads)
    probe(module, factory.runner, max_context, weights)
    return factory


def _compile(model: ov.Model, dtype: str, threads: int, activation_group: int | None = None) -> ov.CompiledModel:
    """Where activations are rounded, it is in groups of `activation_group`."""
    if activation_group is None:
        activation_group = _ACTIVATION_GROUPS[dtype]
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],
        "KV_CACHE_PRECISION": _PRECISIONS[dtype],
        "INFERENCE_NUM_THREADS": str(threads),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(activation_group),
    }
    return core().compile_model(model, "CPU", options)


def take_over_head(
    head: Any, max_context: int, threads: int | None = None
) -> tuple[OpenVinoRunnerFactory, Callable[[Sequence[Float32Array]], Float32Array]]:
    """Converts a draft head, whose products then read weights of 8 bits: rounding makes no draft worse that is verified
    anyway. Returns also what computes its first product, see `HeadParts.combine`.

    That is OpenVINO as well: threads of another library would spin for a while and slow down the next step, which took
    41 instead of 23 ms after a product of NumPy.

    Args:
        head: a `loading.draft_heads.EagleHead`, or `loading.mtp_heads.MtpHead`.
        max_context, threads: as for `take_over`.

    Raises:
        UnsupportedRunnerError: it cannot be converted; with the reason.
    """
    from draftwood_model_runner.runners.openvino.conversion import convert_head

    converted = convert_head(head, max_context)
    quantize_weights(converted.model, 8)
    if head.fc is None:
        return OpenVinoRunnerFactory(converted, threads), np.concatenate
    weight = head.fc.weight.detach().numpy()
    features = ops.parameter([-1, weight.shape[1]], np.float32)
    first = ov.Model([ops.matmul(features, ops.constant(weight), False, True)], [features])
    combine = _compile(first, "float32", threads or default_threads()).create_infer_request()

    def combined(features: Sequence[Float32Array]) -> Float32Array:
        combine.infer([np.concatenate(features)], share_inputs=True)
        made: Float32Array = combine.get_output_tensor(0).data.copy()
        return made

    return OpenVinoRunnerFactory(converted, threads), combined


@torch.inference_mode()
def probe(module: Any, make_runner: Callable[[int], Runner], max_context: int, weights: str = "as-is") -> None:
    """Compares logits along drafted paths, see `Trial.continued`, with those that the module computes as in `generate`.
    With quantized weights, they are compared with the converted model's own logits over the plain sequences, and these
    with the module's.

    Args:
        make_runner: a runner of the converted model, for a number of KV tokens.
        weights: "as-is", or what the converted model's are quantized to.

    Raises:
        UnsupportedRunnerError: they differ by more than rounding, or than quantized weights explain.
    """
    name, vocab = type(module).__name__, int(module.config.get_text_config().vocab_size)
    for trial in _trials(vocab, max_context):
        try:
            runner = make_runner(_KV_TOKENS)
            logits = _drafted(runner, trial)
            plain = _plain(runner, trial) if weights in QUANTIZED_TOLERANCE else None
        except Exception as error:
            raise UnsupportedRunnerError(f"OpenVINO: {name}: {type(error).__name__}: {error}") from error
        expected = trial.generated(module)
        if plain is not None:
            tolerance = QUANTIZED_TOLERANCE[weights]
            _compare(name, plain, expected, tolerance, f"with {weights} weights", "quantization")
            expected = plain
        _compare(name, logits, expected, TOLERANCE[module.dtype], "over a draft tree", "rounding")


def trial_logits(make_runner: Callable[[int], Runner], vocab: int, max_context: int) -> Float32Array:
    """The logits [trial, 2 + PATH, vocab] that `probe` compares, of a converted model alone."""
    runner = make_runner(_KV_TOKENS)
    logits: Float32Array = torch.stack([_drafted(runner, trial) for trial in _trials(vocab, max_context)]).numpy()
    return logits


def _trials(vocab: int, max_context: int) -> list[Trial]:
    longest = max(max_context - PATH, 3)
    return [Trial.random(vocab, min(context, longest)) for context in _CONTEXTS]


def _compare(
    name: str, logits: torch.Tensor, expected: torch.Tensor, tolerance: float, where: str, explained_by: str
) -> None:
    """Raises UnsupportedRunnerError if logits differ by more than `tolerance`."""
    differing = difference(logits, expected)
    if differing > tolerance:
        raise UnsupportedRunnerError(
            f"OpenVINO: {name}: logits {where} differ from the model's own by {differing:.1e} (at most"
            f" {tolerance:.0e} is {explained_by})"
        )


def _drafted(runner: Runner, trial: Trial) -> torch.Tensor:
    model = Stepper(runner.pages, lambda batch: torch.from_numpy(runner.step(batch, 0).logits))
    draft = trial.tree() if runner.draft_limits(trial.context - 1).branches else trial.chain()
    return trial.continued(model, draft, PAGE_SIZE, lambda moves, _: runner.compact_kv(moves))


def _plain(runner: Runner, trial: Trial) -> torch.Tensor:
    """The same logits, by one pass over the sequence."""
    pages = np.arange(runner.pages, dtype=np.int32)
    row = BatchRow(pages, 0, trial.tokens, EMPTY_TREE, logits_from=trial.context - 1)
    logits = torch.from_numpy(runner.step(lay_out([row]), 0).logits)
    return torch.cat([logits, logits[-1:]])


def save(factory: OpenVinoRunnerFactory, folder: Path, vocab: int, max_context: int) -> None:
    """Writes a model that has passed the comparison, without its layout and window, and logits that it computes."""
    ov.serialize(factory.converted.model, folder / _GRAPH, folder / _WEIGHTS)
    np.save(folder / _TRIAL, trial_logits(factory.runner, vocab, max_context), allow_pickle=False)


def file_bytes(factory: OpenVinoRunnerFactory) -> int:
    """The most bytes that the files of a model take; they take about as many."""
    nodes = (node for node in factory.converted.model.get_ordered_ops() if node.get_type_name() == "Constant")
    return _GRAPH_BYTES + sum(int(node.get_byte_size()) for node in nodes)


def load(
    folder: Path,
    layout: PageLayout,
    window: tuple[int | None, bool],
    feature_layers: tuple[int, ...],
    vocab: int,
    max_context: int,
    threads: int | None,
) -> OpenVinoRunnerFactory:
    """A model that `save` wrote.

    Args:
        window: of the `ConvertedModel`, and whether it is in every layer.
        feature_layers: of the `ConvertedModel`.

    Raises:
        Exception: it cannot be read, or does not compute the logits that it did, bit by bit.
    """
    core().get_property("CPU", "FULL_DEVICE_NAME")  # the plugin of the CPU brings the operator PagedAttention
    model = core().read_model(folder / _GRAPH, folder / _WEIGHTS)
    restore_heads(model, layout)
    restore_marks(model)
    factory = OpenVinoRunnerFactory(ConvertedModel(model, layout, *window, feature_layers), threads)
    expected = np.load(folder / _TRIAL, allow_pickle=False)
    if not np.array_equal(trial_logits(factory.runner, vocab, max_context), expected):
        raise ValueError("it does not compute what it did when it was saved")
    return factory
