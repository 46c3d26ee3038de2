"""The output head: the logits of a large vocabulary.

A step of a small model may read its output head for longer than many of its layers. Greedy decoding and top-k sampling
need the greatest logits only. For them the vocabulary is screened in two passes. The first multiplies by a copy of the
head in 8 bits, whose error has a bound. The second computes those logits again, by the head itself, that may be among
the greatest within this bound. So the greatest logits are the same as without screening.

The bound: let w be a row of the head and h a hidden state, and w' and h' the same in 8 bits. Then
wh - w'h' = (w - w')h + w'(h - h'). By the Cauchy-Schwarz inequality this is at most |w - w'| |h| + |w'| |h - h'|. LEMP
(Teflioudi and others, SIGMOD 2015) prunes an exact search for the greatest products by the same inequality.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from draftwood_model_runner.runners.openvino.weights import GROUP
from draftwood_model_runner.sampling.selection import BLOCK, find_greatest, float_of_bits, score_of
from draftwood_strategies.arrays import Float32Array, Int32Array, Real
from draftwood_strategies.native import compiled
from draftwood_strategies.threads import LEAST_NUMBERS, in_threads, parts

_log = logging.getLogger(__name__)

_LEVELS = 127
_ROUNDING = np.float32(2.0**-7)
"""The largest relative error of a product. The product and the scale of its row are rounded to bfloat16, by 2^-9
each."""
_SLACK = 1.1
"""Factor of the bound, as OpenVINO may round the scales of hidden values in another way."""
_CHUNK = 4096
"""Rows of the head that are rounded at once."""
_LANES = 16
_MOST_NEEDED = 64
"""A step that needs more of the greatest logits computes all exactly."""
_MOST_CORRECTED = 4096
"""The most logits of a step that are computed twice, in some milliseconds. With more of them all are computed
exactly."""
_SMOOTHING = 0.125
"""Share of the latest time in the mean time of a way to compute logits."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024
"""Steps after which the slower way is tried again. The pause doubles each time that it is still slower."""
_TRIED_ROWS, _TRIED_TIMES, _LEAST_GAIN = (1, 16), 5, 1.1
"""Rows and repetitions of the trial, and how many times as fast screening must be in it."""
_LEAST_ELEMENTS = 1 << 24
"""The smallest matrix that is cut off. A smaller one is read in a millisecond."""
_KINDS = {"float32": (ov.Type.f32, np.int32), "bfloat16": (ov.Type.bf16, np.uint16)}


class CutModel(NamedTuple):
    """A model in two parts, which share its constants.

    Attributes:
        body: the inputs of the model; its first output is what the head multiplies, float32[R, 1, d], further ones are
            those of the model.
        head: from float32[R, d] to logits float32[R, vocab].
        weights: the matrix [vocab, d], the bits of bfloat16 as uint16 or of float32 as int32; memory of the model.
    """

    body: ov.Model
    head: ov.Model
    weights: npt.NDArray[Any]


def cut_at_head(model: ov.Model, dtype: str) -> CutModel | None:
    """Divides a model before its output head, a product with a matrix that has a row for each token.

    Returns None if the head is small, if its matrix is not of `dtype` ("float32" or "bfloat16"), or if logits are more
    than this product. The model is left as it was.
    """
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() == "Reshape":
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul":
        return None
    attributes, matrix = node.get_attributes(), node.input_value(1)
    source = matrix.get_node()
    constant = source.input_value(0).get_node() if source.get_type_name() == "Convert" else source
    transposed = attributes["transpose_b"] and not attributes["transpose_a"]
    if not transposed or constant.get_type_name() != "Constant" or np.prod(list(constant.shape)) < _LEAST_ELEMENTS:
        return None
    kind, bits = _KINDS[dtype]
    if constant.get_element_type() != kind:
        return None
    weights = constant.data.view(bits)
    hidden = ops.parameter([-1, weights.shape[1]], np.float32)
    head = ov.Model([ops.matmul(hidden, matrix, False, True)], [hidden])
    others = [result.input_value(0) for result in model.get_results()[1:]]
    return CutModel(ov.Model([node.input_value(0), *others], model.get_parameters()), head, weights)


class _Rounded(NamedTuple):
    """A head in 8 bits.

    Attributes:
        levels: int8[vocab, d]; row t of the head is about `levels[t] * scales[t]`.
        scales: float32[vocab, 1].
        errors: float32[blocks], the largest |w - w'| in each block of `BLOCK` tokens.
        lengths: float32[blocks], the largest |w'| in each block.
    """

    levels: npt.NDArray[np.int8]
    scales: Float32Array
    errors: Float32Array
    lengths: Float32Array


class FasterWay:
    """Chooses the faster of two ways to do the same, by the mean time that each took lately.

    It tries the slower way again after a while.
    """

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0]
        self._steps, self._pause = 0, _FIRST_PAUSE

    def choose(self) -> int:
        """The way to take: 0 or 1. Each is taken once before they are compared."""
        if not all(self._seconds):
            return 0 if self._seconds[1] else 1
        faster = int(self._seconds[1] < self._seconds[0])
        self._steps += 1
        return 1 - faster if self._steps >= self._pause else faster

    def took(self, way: int, seconds: float) -> None:
        """The way that was chosen took so long."""
        tried, old = self._steps >= self._pause, self._seconds[way]
        self._seconds[way] = old + _SMOOTHING * (seconds - old) if old and not tried else seconds
        if tried:
            faster = int(self._seconds[1] < self._seconds[0])
            self._steps, self._pause = 0, _FIRST_PAUSE if way == faster else min(2 * self._pause, _LONGEST_PAUSE)


class OutputHead:
    """The last product of a model, from hidden states to logits.

    Args:
        head: from float32[R, d] to logits float32[R, vocab].
        weights: [vocab, d], the bits of bfloat16 as uint16 or of float32 as int32.
        compile_model: compiles a model for the data type and the threads of the runner.
        threads: that look through logits.

    Attributes:
        width: numbers of a hidden state, d.
    """

    def __init__(
        self,
        head: ov.Model,
        weights: npt.NDArray[Any],
        compile_model: Callable[[ov.Model], ov.CompiledModel],
        threads: int,
    ) -> None:
        self._weights, self._shift, self._threads = weights, _shift(weights), threads
        self.width: int = weights.shape[1]
        self._exact = _Product(compile_model(head))
        rounded = _rounded(weights, threads)
        self._errors, self._lengths = rounded.errors, rounded.lengths
        self._rough: _Product | None = _Product(compile_model(_rough_head(rounded)))
        self._ways: dict[tuple[int, int], FasterWay] = {}
        """Whether to screen: way 1. The key is the bit length of the number of rows, and `exact_top_k`."""
        if not self._trial(self._rough):
            self._rough = None
        else:
            _log.info("output head: its copy in 8 bits takes %.2f GB", rounded.levels.nbytes / 1e9)

    def logits(self, hidden: Float32Array, exact_top_k: int | None) -> Float32Array:
        """Logits float32[R, vocab], which the next call overwrites.

        Args:
            hidden: float32[R, d]; R may be 0, as in a step that ends no prompt.
            exact_top_k: how many of the greatest logits of each row must be exact. Logits that equal the last of these
                are exact too. The others may be off, by less than it takes to be among them. None: all are exact.
        """
        rows = hidden.shape[0]
        if not rows:
            return np.empty((0, self._weights.shape[0]), np.float32)
        if exact_top_k is None or exact_top_k > _MOST_NEEDED or self._rough is None:
            return self._exact(hidden)
        ways = self._ways.setdefault((rows.bit_length(), exact_top_k), FasterWay())
        way, started = ways.choose(), time.perf_counter()
        logits = self._screened(self._rough, hidden, exact_top_k) if way else self._exact(hidden)
        ways.took(way, time.perf_counter() - started)
        return logits

    def _screened(self, rough: _Product, hidden: Float32Array, exact_top_k: int) -> Float32Array:
        inputs = _to_bfloat16(hidden) if self._shift else hidden
        logits = rough(inputs)
        return logits if self._correct(logits, inputs, exact_top_k) else self._exact(hidden)

    def _correct(self, logits: Float32Array, inputs: Float32Array, exact_top_k: int) -> bool:
        """Makes the greatest logits exact. Returns False if more logits than `_MOST_CORRECTED` may be among them."""
        rows, vocab = logits.shape
        lengths, deviations = np.linalg.norm(inputs, axis=1), _rounding_error(inputs)
        divided = parts(rows, self._threads if rows * vocab >= LEAST_NUMBERS else 1)
        corrected = list[bool]()

        def correct(part: range) -> None:
            at = slice(part.start, part.stop)
            within = _correct_rows(
                logits[at], logits.view(np.int32)[at], self._weights, self._shift, inputs[at], self._errors,
                self._lengths, lengths[at], deviations[at], np.empty(self._errors.shape[0], np.int32),
                np.empty(exact_top_k, np.float32), np.empty(_LANES, np.float32), _MOST_CORRECTED // len(divided),
            )  # fmt: skip
            corrected.append(within)

        in_threads([partial(correct, part) for part in divided], self._threads)
        return all(corrected)

    def _trial(self, rough: _Product) -> bool:
        """Whether products in 8 bits are faster here, and their errors within the bound.

        They are within it if OpenVINO rounds as this module assumes. How many logits a step computes twice is not
        known here; `FasterWay` sees it in the steps.
        """
        random, worth = np.random.default_rng(0), True
        tried = [random.standard_normal((rows, self.width), np.float32) for rows in _TRIED_ROWS]
        for hidden in map(_to_bfloat16, [*tried, self._with_outliers()]):
            logits = rough(hidden)
            off = np.abs(self._exact(hidden) - logits)
            if (off > self._bounds(hidden, logits)).any():
                _log.warning("output head: products in 8 bits are off by more than they should; it is not screened")
                return False
        for hidden in map(_to_bfloat16, tried):
            rows = hidden.shape[0]
            self._correct(rough(hidden), hidden, 1)  # compiles
            exact, screened = (
                min(product.seconds(hidden) for _ in range(_TRIED_TIMES)) for product in (self._exact, rough)
            )
            _log.info("output head: %d rows take %.1f ms, %.1f ms screened", rows, 1000 * exact, 1000 * screened)
            worth = worth and exact > _LEAST_GAIN * screened
        return worth

    def _with_outliers(self) -> Float32Array:
        """Hidden states, float32[R, d], that show whether a product rounds them by the group, as it should.

        Each has one large number. The others are below half a level of it. A product that rounds by the row would lose
        them all. Their signs are those of a row of the head, so the logit of this row's token is far off then.
        """
        rows = _to_float32(self._weights[:: -(-self._weights.shape[0] // _TRIED_ROWS[-1])])
        hidden = np.where(rows < 0, np.float32(-0.49), np.float32(0.49))
        hidden[np.arange(rows.shape[0]), np.abs(rows).argmin(1)] = _LEVELS
        return hidden

    def _bounds(self, inputs: Float32Array, logits: Float32Array) -> Float32Array:
        """How much the logits may be off, float32[R, vocab], by the bound of `_correct_rows`."""
        lengths = np.linalg.norm(inputs, axis=1)
        of_blocks = np.outer(lengths, self._errors) + np.outer(_rounding_error(inputs), self._lengths)
        of_tokens = np.repeat(of_blocks, BLOCK, axis=1)[:, : logits.shape[1]]
        return (of_tokens + _ROUNDING * np.abs(logits)).astype(np.float32)


class _Product:
    """A compiled head."""

    def __init__(self, compiled_model: ov.CompiledModel) -> None:
        self._request = compiled_model.create_infer_request()

    def __call__(self, hidden: Float32Array) -> Float32Array:
        self._request.infer([hidden], share_inputs=True, share_outputs=True)
        logits: Float32Array = self._request.get_output_tensor(0).data
        return logits

    def seconds(self, hidden: Float32Array) -> float:
        started = time.perf_counter()
        self(hidden)
        return time.perf_counter() - started


def _rounding_error(hidden: Float32Array) -> Float32Array:
    """A bound of |h - h'| for rows of float32[R, d]; float32[R].

    Each number changes by half a level at most. A level is 1 / `_LEVELS` of the largest number in the group.
    """
    size = hidden.shape[1]
    group = GROUP if size % GROUP == 0 else size
    largest = np.abs(hidden.reshape(hidden.shape[0], -1, group)).max(2)
    error: Float32Array = np.linalg.norm(largest, axis=1) * np.float32(_SLACK * group**0.5 / (2 * _LEVELS))
    return error


def _rounded(weights: npt.NDArray[Any], threads: int) -> _Rounded:
    vocab = weights.shape[0]
    levels = np.empty(weights.shape, np.int8)
    scales, errors, lengths = np.empty((vocab, 1), np.float32), *np.zeros((2, -(-vocab // BLOCK) * BLOCK), np.float32)

    def round_rows(part: range) -> None:
        for begin in range(part.start, part.stop, _CHUNK):
            end = min(begin + _CHUNK, part.stop)
            at = slice(begin, end)
            rows = _to_float32(weights[at])
            scales[at] = np.maximum(np.abs(rows).max(1, keepdims=True), 1e-30) / _LEVELS
            levels[at] = np.rint(rows / scales[at])
            in_8_bits = levels[at] * scales[at]
            errors[at] = np.linalg.norm(rows - in_8_bits, axis=1)
            lengths[at] = np.linalg.norm(in_8_bits, axis=1)

    in_threads([partial(round_rows, part) for part in parts(vocab, threads)], threads)
    return _Rounded(levels, scales, errors.reshape(-1, BLOCK).max(1), lengths.reshape(-1, BLOCK).max(1))


def _rough_head(rounded: _Rounded) -> ov.Model:
    hidden = ops.parameter([-1, rounded.levels.shape[1]], np.float32)
    matrix = ops.multiply(ops.convert(ops.constant(rounded.levels), "f32"), ops.constant(rounded.scales))
    return ov.Model([ops.matmul(hidden, matrix, False, True)], [hidden])


def _shift(weights: npt.NDArray[Any]) -> np.int32:
    """How far the bits of a weight are shifted to be the bits of a float32."""
    return np.int32(16 if weights.dtype == np.uint16 else 0)


def _to_float32(weights: npt.NDArray[Any]) -> Float32Array:
    return (weights.astype(np.int32) << _shift(weights)).view(np.float32)


def _to_bfloat16(values: Float32Array) -> Float32Array:
    """The values as a product in bfloat16 rounds its inputs: to the nearest, ties to even. They stay float32."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


@compiled
def _correct_rows(
    logits: Float32Array,
    bits: Int32Array,
    weights: npt.NDArray[Any],
    shift: np.int32,
    inputs: Float32Array,
    errors: Float32Array,
    weight_lengths: Float32Array,
    lengths: Float32Array,
    deviations: Float32Array,
    greatest: Int32Array,
    highest_bounds: Float32Array,
    lanes: Float32Array,
    limit: int,
) -> bool:
    """Replaces the logits of each row that may be among its k greatest by exact ones. Returns False if there are more
    than `limit`.

    A first pass over the blocks finds the k highest lower bounds of their greatest logits. A logit whose upper bound is
    below the last of these cannot be among the k greatest.

    Args:
        logits, bits: float32[R, vocab] and the same memory as int32.
        weights, shift: as in `OutputHead`, see `_shift`.
        inputs: float32[R, d].
        errors, weight_lengths: as in `_Rounded`.
        lengths, deviations: float32[R], |h| and the bound of |h - h'|.
        greatest, highest_bounds, lanes: workspace, int32[blocks], float32[k] and float32[_LANES].
        limit: of all rows together.
    """
    vocab, needed, left = logits.shape[1], highest_bounds.shape[0], limit
    for row in range(logits.shape[0]):
        find_greatest(bits[row], greatest)
        length, deviation = lengths[row], deviations[row]
        for i in range(highest_bounds.shape[0]):
            highest_bounds[i] = -np.inf
        for block in range(greatest.shape[0]):
            score = score_of(greatest[block])
            low = score - errors[block] * length - weight_lengths[block] * deviation - _ROUNDING * abs(score)
            place = needed
            while place > 0 and low > highest_bounds[place - 1]:
                if place < needed:
                    highest_bounds[place] = highest_bounds[place - 1]
                place -= 1
            if place < needed:
                highest_bounds[place] = low
        for block in range(greatest.shape[0]):
            off = errors[block] * length + weight_lengths[block] * deviation
            threshold, score = highest_bounds[needed - 1] - off, score_of(greatest[block])
            if score + _ROUNDING * abs(score) < threshold:
                continue
            for token in range(block * BLOCK, min(vocab, (block + 1) * BLOCK)):
                score = logits[row, token]
                if score + _ROUNDING * abs(score) >= threshold:
                    if left == 0:
                        return False
                    left -= 1
                    logits[row, token] = _product(weights, shift, token, inputs, row, lanes)
    return True


@compiled
def _product(
    weights: npt.NDArray[Any], shift: np.int32, token: int, inputs: Float32Array, row: int, lanes: Float32Array
) -> Real:
    """A row of the head times a row of the inputs, in float32, by several sums at once, which is faster."""
    size = inputs.shape[1]
    for lane in range(_LANES):
        lanes[lane] = 0.0
    for begin in range(0, size - _LANES + 1, _LANES):
        for lane in range(_LANES):
            weight = float_of_bits(np.int32(np.int32(weights[token, begin + lane]) << shift))
            lanes[lane] += weight * inputs[row, begin + lane]
    for i in range(size - size % _LANES, size):
        lanes[0] += float_of_bits(np.int32(np.int32(weights[token, i]) << shift)) * inputs[row, i]
    total: Real = np.float32(0.0)
    for lane in range(_LANES):
        total += lanes[lane]
    return total
