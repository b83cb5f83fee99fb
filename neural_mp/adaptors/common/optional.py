"""What an adaptor may offer beyond its contract: each part is an object of functions, or None."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from neural_mp.adaptors.common.cross_layer_scaling import LayerParams, LayerRescale
from neural_mp.adaptors.common.op_outputs import OpOutput
from neural_mp.core.graph import OpGraph
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.kernel_trace import OpTrace
from neural_mp.errors import ConversionError

M = TypeVar("M")
P = TypeVar("P")


def needed(part: P | None, framework: str, what: str) -> P:
    """A part that something cannot do without.

    Args:
        part: what an adaptor offers.
        framework: its framework.
        what: the part in words.

    Raises:
        ConversionError: the adaptor does not offer it.
    """
    if part is None:
        raise ConversionError(f"the adaptor of {framework} offers no {what}")
    return part


@dataclass(frozen=True)
class OpTiming(Generic[M]):
    """How long single ops take.

    Attributes:
        time_ops: model, inputs, number of runs → op, or conversion by a name of its own → seconds
            of each run, in order. What runs along with another op is counted with that op.
    """

    time_ops: Callable[[M, Any, int], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class KernelTrace(Generic[M]):
    """The kernels that a run is made of, for audits.

    Attributes:
        trace: model, inputs → op → what ran for it in one run, by the runtime's own account. An op
            of which nothing is found ran along in the kernel of another, or needed none. One that
            the run did not come to has no kernels.
    """

    trace: Callable[[M, Any], Mapping[str, OpTrace]]


@dataclass(frozen=True)
class OpOutputs(Generic[M]):
    """What single ops compute, for comparisons, and to find where NaN begins.

    Attributes:
        results: model → the ops whose results a run has, as the untouched model calls them: of
            that, those of its graph; of a converted one, ops that run within the kernel of another
            are left out, and edges lead past them.
        values: model, some of its `results` → a function that runs one batch and gives the results
            of these ops. What is stored in integers comes as the real numbers that they stand for;
            what holds no real numbers, or lies in a branch that is not taken, is left out.
        first_non_finite: model, inputs → the first op whose result holds NaN or Inf; None if there
            is none.
    """

    results: Callable[[M], OpGraph]
    values: Callable[[M, Collection[str]], Callable[[Any], Mapping[str, OpOutput]]]
    first_non_finite: Callable[[M, Any], str | None]


def _no_ops(model: Any) -> Collection[str]:
    return ()


@dataclass(frozen=True)
class Corrections(Generic[M]):
    """The constants of layers and normalizations, for repairs and second derivatives.

    Attributes:
        layers: model → op → its constants. Layers are those with INT8 kernels and a weight;
            weights are read only when asked for.
        with_layers: model, op → change → the model with other constants in some of its `layers`;
            the model given is untouched.
        channel_keepers: model → the ops that only move values, and leave every channel where it is.
    """

    layers: Callable[[M], Mapping[str, LayerParams]]
    with_layers: Callable[[M, Mapping[str, LayerRescale]], M]
    channel_keepers: Callable[[M], Collection[str]] = _no_ops


@dataclass(frozen=True)
class Hessian(Generic[M]):
    """Second derivatives, where there are gradients.

    Attributes:
        hessian_traces: model, batches, ops → op → trace of the Hessian by its weight, of the loss
            in `adaptors.common.hessian`.
    """

    hessian_traces: Callable[[M, Iterable[Any], Collection[str]], Mapping[str, float]]


@dataclass(frozen=True)
class Portability(Generic[M]):
    """Integer weights, where kernels that multiply bytes saturate on some processors.

    Attributes:
        wide_kernels: model → the kinds of its integer kernels that are right only where products
            are exact: those with weights beyond ±63.
        right_everywhere: converted model → the model with weights that are right on every
            processor; `ConversionError` where that cannot be made of it.
    """

    wide_kernels: Callable[[M], frozenset[KernelKind]]
    right_everywhere: Callable[[M], M]


@dataclass(frozen=True)
class SingleFile(Generic[M]):
    """Single files of the framework's own, for use without this package.

    Attributes:
        suffixes: their endings.
        save_file: model, file, metadata → nothing; what does not fit goes into files beside it,
            and metadata where such files have room for that.
    """

    suffixes: tuple[str, ...]
    save_file: Callable[[M, Path, Mapping[str, str]], None]


@dataclass(frozen=True)
class OnnxExport(Generic[M]):
    """A way to ONNX.

    Attributes:
        export_onnx: model, file, metadata → nothing; metadata is among the file's properties.
            `ConversionError` where the model has ops that ONNX lacks.
    """

    export_onnx: Callable[[M, Path, Mapping[str, str]], None]


@dataclass(frozen=True)
class Compiler(Generic[M]):
    """A compiler that models are run through.

    Attributes:
        compiled: model → the framework's own object, compiled.
    """

    compiled: Callable[[M], Any]


@dataclass(frozen=True)
class Drawing(Generic[M]):
    """Graphs for people to look at.

    Attributes:
        draw: model, path without an ending → the files written: in the framework's binary form,
            and as text, without large weights.
    """

    draw: Callable[[M, Path], tuple[Path, ...]]
