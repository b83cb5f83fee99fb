"""Optional parts of an adaptor: each is an object of functions, or None.

Optional functions that stand alone are methods of `adaptors.common.framework.Framework`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from neural_mp.adaptors.common.op_outputs import OpOutput
from neural_mp.adaptors.common.signatures.boundary import Boundary
from neural_mp.adaptors.common.trainable import TrainableModel
from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.adaptors.common.weights.checkpoint_formats import CheckpointFormat, IntegerLayer
from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerParams, LayerRescale
from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupedWeight,
    GroupParameters,
    InputMoments,
    Quantizer,
)
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Device
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.precision import Precision
from neural_mp.core.training_numerics import ModelTrace
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array

M = TypeVar("M")
P = TypeVar("P")


def require_part(part: P | None, framework: str, what: str) -> P:
    """Return a required part of an adaptor; `what` names the part in the error.

    Raises:
        ConversionError: the adaptor does not offer the part.
    """
    if part is None:
        raise missing_part_error(framework, what)
    return part


def missing_part_error(framework: str, what: str) -> ConversionError:
    """Return the error for a missing part or method of an adaptor; `what` names the part."""
    return ConversionError(f"the adaptor of {framework} offers no {what}")


@dataclass(frozen=True)
class LayerTiming(Generic[M]):
    """Runs of single layers, for models whose layers are graphs of their own.

    Attributes:
        shapes: model → dense layer → the properties that decide on its time in one configuration.
        run: model, original or converted, layer, number of rows → a function that runs the layer.
    """

    shapes: Callable[[M], Mapping[str, Hashable]]
    run: Callable[[M, str, int], Callable[[], object]]


@dataclass(frozen=True)
class OpOutputs(Generic[M]):
    """Results of single ops, for comparisons and to locate the origin of NaN.

    Attributes:
        observable_ops: model → the ops whose results a run can return, by their unconverted names:
            for an unconverted model, the ops of its graph; for a converted model, fused ops are
            omitted and bypassed by edges.
        op_outputs: model, some of its `observable_ops` → a function that runs one batch and returns
            the results of these ops. Quantized results are dequantized; results that are not
            float, or in a branch not taken, are omitted.
        first_non_finite: model, inputs → the first op whose result holds NaN or Inf; None if there
            is none.
    """

    observable_ops: Callable[[M], OpGraph]
    op_outputs: Callable[[M, Collection[str]], Callable[[Any], Mapping[str, OpOutput]]]
    first_non_finite: Callable[[M, Any], str | None]


@dataclass(frozen=True)
class UnoptimizedRun(Generic[M]):
    """Runs without the optimizations of a runtime, to check its fusions.

    Attributes:
        outputs: model, inputs → the outputs.
        first_deviating: model, inputs → the first op whose result differs between a run with and
            without optimizations by more than rounding; None if unknown.
    """

    outputs: Callable[[M, Any], list[Any]]
    first_deviating: Callable[[M, Any], str | None]


@dataclass(frozen=True)
class Corrections(Generic[M]):
    """The constants of layers and normalizations, for corrections and second derivatives.

    Attributes:
        layer_params: model → op → its constants, for ops with an INT8 kernel and a weight; weights
            are read lazily.
        with_layer_params: model, op → change → a copy with changed constants in some of these ops.
        channel_preserving_ops: model → the ops that move values and leave every channel in place.
        values: as in `LayerInputs`; None if weights cannot be reconstructed.
    """

    layer_params: Callable[[M], Mapping[str, LayerParams]]
    with_layer_params: Callable[[M, Mapping[str, LayerRescale]], M]
    channel_preserving_ops: Callable[[M], Collection[str]] = lambda model: ()
    values: Callable[[M, Iterable[Any], Collection[str]], Iterable[tuple[str, Array]]] | None = None


#: Outputs of a model, and whether they are logits → direction at each output.
Direction = Callable[[Sequence[Array], bool], Sequence[Array]]


@dataclass(frozen=True)
class Gradients(Generic[M]):
    """Gradients by weights, if the framework has them.

    Attributes:
        weights: model → op → its weight, float32 [outputs, inputs], for dense layers and tables.
        weight_gradients: model, inputs, ops, direction → op → gradient by its weight of the sum of
            outputs · direction; without ops that the inputs do not reach. The outputs are those
            with the name `logits`, or else all.
    """

    weights: Callable[[M], Mapping[str, Array]]
    weight_gradients: Callable[[M, Any, Collection[str], Direction], Mapping[str, Array]]


@dataclass(frozen=True)
class Blocks(Generic[M]):
    """Passes over the blocks of a decoder, one after another: memory for one block at a time.

    Ops outside of blocks, and models without, are left out. Batches are a function, as they may be
    read several times.

    Attributes:
        moments: model, batches, ops, predicate → for each block with some of the ops, the moments
            of their inputs in the float model. The predicate is called with the ops of a block; if
            true, the block is left out.
        learned: model, batches, op → quantizer, options, recall, start → for each block with some
            of the ops, op → weight, rounded for the results of the block after the rounded blocks
            before. `recall` is called with the ops of each block in turn, and returns their weights
            if they are known; else `start` returns the weight of an op that descent starts from,
            given the moments of its inputs if they were needed.
    """

    moments: Callable[
        [M, Callable[[], Iterable[Any]], Collection[str], Callable[[Collection[str]], bool]],
        Iterator[Mapping[str, InputMoments]],
    ]
    learned: Callable[
        [
            M,
            Callable[[], Iterable[Any]],
            Mapping[str, Quantizer],
            LearnOptions,
            Callable[[Collection[str]], Mapping[str, GroupedWeight] | None],
            Callable[[str, InputMoments | None], GroupedWeight],
        ],
        Iterator[Mapping[str, GroupedWeight]],
    ]


@dataclass(frozen=True)
class GroupedWeights(Generic[M]):
    """Corrections of weights in groups.

    Attributes:
        weights: model → op → its weight, float32 [outputs, inputs], for dense layers and tables.
        input_moments: model, batches, ops → op → moments of its inputs, for the dense layers that
            the batches reach.
        with_weights: model, op → weight → a model whose next conversion stores these weights.
        parameters: the parameters of groups that the kernels read.
        blocks: passes block by block; None without.
    """

    weights: Callable[[M], Mapping[str, Array]]
    input_moments: Callable[[M, Iterable[Any], Collection[str]], dict[str, InputMoments]]
    with_weights: Callable[[M, Mapping[str, GroupedWeight]], M]
    parameters: GroupParameters = GroupParameters.BFLOAT16
    blocks: Blocks[M] | None = None


@dataclass(frozen=True)
class StoredLayer:
    """A dense layer or a table.

    Attributes:
        weight: reads the weight, float32 [outputs, inputs], or the rows of a table.
        read: the tensor that a dense layer reads, inputs last; None for a table.
    """

    weight: Callable[[], Array]
    read: str | None = None


@dataclass(frozen=True)
class LayerInputs(Generic[M]):
    """Inputs of layers, for the noise of weights where there are no gradients.

    Attributes:
        layers: model → op → its weight and the tensor that it reads, for dense layers and tables.
        values: model, batches, tensors → pairs of a tensor and its values in a part of a batch,
            which may be overwritten after the pair.
    """

    layers: Callable[[M], Mapping[str, StoredLayer]]
    values: Callable[[M, Iterable[Any], Collection[str]], Iterable[tuple[str, Array]]]


@dataclass(frozen=True)
class Portability(Generic[M]):
    """Integer weights for CPUs with saturating accumulation.

    Attributes:
        full_range_kernels: model → the kinds of its integer kernels that are correct only with
            exact accumulation: those with weights beyond ±63.
        with_reduced_range: converted model → the model with weights that are correct on every CPU;
            `ConversionError` if impossible.
    """

    full_range_kernels: Callable[[M], frozenset[KernelKind]]
    with_reduced_range: Callable[[M], M]


@dataclass(frozen=True)
class SingleFile(Generic[M]):
    """Single files in the framework's own format, for use without this package.

    Attributes:
        suffixes: the file suffixes.
        save_file: model, file, metadata → None; excess data goes into files next to it, and
            metadata into files that support it.
        add_metadata: folder of `Framework.save`, metadata → None, of the file in the folder that
            can be used without this package; None if the file has no metadata.
    """

    suffixes: tuple[str, ...]
    save_file: Callable[[M, Path, Mapping[str, str]], None]
    add_metadata: Callable[[Path, Mapping[str, str]], None] | None = None


@dataclass(frozen=True)
class Checkpoints(Generic[M]):
    """Checkpoints in the formats of other tools.

    Attributes:
        export: model, folder, format → None; `ConversionError` if the format cannot hold the model.
        read: folder → the model in float, as `load` accepts it, and the integer weights of its
            layers, by name.
    """

    export: Callable[[M, Path, CheckpointFormat], None]
    read: Callable[[Path], tuple[Any, Mapping[str, IntegerLayer]]]


@dataclass(frozen=True)
class Transfer(Generic[M]):
    """Transfer of models to other runtimes by a file.

    Attributes:
        format: the format of the file, as in `reads` of `neural_mp.adaptors.detect`.
        boundary: model → its calls; a tensor `#1` is the second one of the file, any other is
            found by its name. `ConversionError` if the model must stay in its framework.
        write: model, existing folder → the path of the written file.
        tensor: array → tensor of the framework; None if the framework returns arrays.
    """

    format: str
    boundary: Callable[[M], Boundary]
    write: Callable[[M, Path], Path]
    tensor: Callable[[Array], Any] | None = None


@dataclass(frozen=True)
class Compiler(Generic[M]):
    """Compilation of models.

    Attributes:
        compile: model → the framework's own object, compiled.
        runtime: name of the compiled form as a runtime.
        missing: → why nothing can be compiled on this machine; empty if it can.
        compiling: model → the model whose calls, and those of its converted forms, are compiled.
    """

    compile: Callable[[M], Any]
    runtime: str
    missing: Callable[[], str]
    compiling: Callable[[M], M]


@dataclass(frozen=True)
class Training:
    """Mixed-precision training of the user's own model, which is not loaded by the adaptor.

    Attributes:
        open_trainable: model, first batch, loss, precision (BF16 or FP16), optimizer → a context
            with the `TrainableModel`, at whose end the model is restored; loss and optimizer as
            passed to `neural_mp.training.advise`, None by default. `ConfigurationError` if model,
            loss or optimizer are invalid; `DataError` if the batch does not fit the model.
        apply_plan: model, layer → precision (FP32 or one of 16 bits) → the model, which trains in
            these precisions from then on; `UnknownOperatorError` if the model lacks a layer.
        trace_numerics: model, batch, loss, loss scale → the trace of a training pass, without
            gradients if there is no loss; the model stays unchanged. Errors as above.
        devices: the devices that the framework can access; none by default.
    """

    open_trainable: Callable[
        [Any, Any, Any, Precision, Any], AbstractContextManager[TrainableModel]
    ]
    apply_plan: Callable[[Any, Mapping[str, Precision]], Any]
    trace_numerics: Callable[[Any, Any, Any, float], ModelTrace]
    devices: Callable[[], Sequence[Device]] = tuple
