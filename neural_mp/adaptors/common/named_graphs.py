"""Models that a runtime compiles as graphs with named tensors, and the base of their adaptors.

The metadata of a saved model is a JSON file next to the framework's own files. While a graph is
converted to the precisions of a plan, a tensor has variants by dtype. A variant is created once, on
first use: one conversion for every tensor and direction, and none without a consumer.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.signatures.input_spec import (
    InputSpec,
    make_synthetic_example,
    unused_capture_warning,
)
from neural_mp.adaptors.common.signatures.signature import (
    Array,
    Shape,
    Signature,
    parse_tensor_shape,
)
from neural_mp.adaptors.common.threads import ThreadLimit, get_allowed_threads, limit_op_threads
from neural_mp.adaptors.common.weights.grouped_weight import GroupedWeight
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.core.enums import Capture
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.errors import ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.util.validators import Validator, mapping_of, string

T = TypeVar("T")

#: Common entries of converted graphs, whatever the framework.
CONVERTED: Mapping[str, Validator[Any]] = {
    "counts": ConversionCounts.from_dict,
    "ops": mapping_of(string),
}
#: Optional entries, absent from files of earlier versions.
LATER: Mapping[str, Validator[Any]] = {
    "results": mapping_of(OutputLocation.from_list),
    "example": mapping_of(parse_tensor_shape),
}
P = TypeVar("P")
G = TypeVar("G", bound="GraphModel[Any]")

#: Function: tensor → array → the outputs, in the order of the signature.
Run = Callable[[Mapping[str, Array]], list[Any]]


def collect_model_details(
    signature: Signature,
    example: Mapping[str, Array],
    ops: Mapping[str, str],
    results: Mapping[str, OutputLocation],
    counts: ConversionCounts,
) -> dict[str, Any]:
    """Return the signature and the entries of `CONVERTED` and `LATER` for JSON."""
    tensors = [port.tensor for port in signature.inputs if port.dtype is not None]
    return {
        **signature.to_dict(),
        "counts": vars(counts),
        "ops": dict(ops),
        "results": {op: result.to_list() for op, result in results.items()},
        # Sizes of the example inputs, not their values, which are the user's data.
        "example": {tensor: list(np.shape(example[tensor])) for tensor in tensors},
    }


def restore_example_inputs(signature: Signature, details: Mapping[str, Any]) -> dict[str, Array]:
    """Return synthetic inputs with the sizes of the example before saving, if stored."""
    shapes: Mapping[str, Shape] = details.get("example", {})
    inputs = (replace(port, shape=shapes.get(port.tensor, port.shape)) for port in signature.inputs)
    return make_synthetic_example(replace(signature, inputs=tuple(inputs)))


def write_details(file: Path, details: Mapping[str, Any]) -> None:
    """Write dicts, lists, strings and numbers as JSON."""
    file.write_text(json.dumps(details, indent=1), encoding="utf-8")


def read_details(file: Path, schema: Validator[T]) -> T:
    """Return the metadata in a file; raise `ModelLoadError` if missing or invalid."""
    return read_json(file, schema, ModelLoadError)


@dataclass(frozen=True, eq=False)
class GraphModel(ABC, Generic[P]):
    """A graph that a runtime compiles, generic in the type of graph.

    Attributes:
        program: the graph for planning: canonicalized, or converted.
        example: tensor → array, inputs for a run.
        given: the user's graph; None for a converted model.
        ops: for a converted model, node → the op of the unconverted graph that its time counts
            towards, if the names differ.
        results: for a converted model, op of the unconverted graph → location of its result; ops
            fused into others have none.
        warnings: notes to the user.
        grouped: op → weight in groups that the next conversion stores.
    """

    program: P
    signature: Signature
    example: dict[str, Array]
    given: P | None
    ops: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, OutputLocation] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    counts: ConversionCounts = ConversionCounts()
    grouped: Mapping[str, GroupedWeight] = field(default_factory=dict, repr=False)
    #: Number of threads, None without a request → the compiled graph.
    _runners: dict[int | None, Run] = field(default_factory=dict)

    @property
    def active_graph(self) -> P:
        """The graph to run: the user's own, unless converted."""
        return self.program if self.given is None else self.given

    @abstractmethod
    def compile_graph(self) -> Run:
        """Return the compiled graph to run, for the allowed number of threads."""

    def get_runner(self) -> Run:
        """Return the compiled graph, compiled if it was not yet for the number of threads."""
        requested = ThreadLimit.threads
        run = self._runners.get(requested)
        if run is None:
            # Without a request, the environment decides when the graph is compiled.
            threads = get_allowed_threads()
            run = self._runners.get(threads) or self.compile_graph()
            self._runners[threads] = self._runners[requested] = run
        return run

    def run(self, bound: Mapping[str, Array]) -> list[Any]:
        """Return the outputs for bound inputs, in the order of the signature."""
        return self.get_runner()(bound)


def with_weights(model: G, weights: Mapping[str, GroupedWeight]) -> G:
    """Return a model whose next conversion stores these weights, by op."""
    return replace(model, grouped=weights, _runners={})


def collect_graph_details(model: GraphModel[Any]) -> dict[str, Any]:
    """Return the metadata of a model for JSON."""
    details = collect_model_details(
        model.signature, model.example, model.ops, model.results, model.counts
    )
    return {**details, "converted": model.given is None}


class GraphAdaptor(Adaptor[G]):
    """An adaptor of a runtime that compiles graphs, from and to numpy arrays."""

    #: The name of the format in messages.
    title: ClassVar[str]

    threads = staticmethod(limit_op_threads)

    @abstractmethod
    def read_model(self, source: object, spec: InputSpec) -> G:
        """Read and canonicalize a model, as described in `Adaptor.load`."""

    def load(
        self,
        source: object,
        *,
        inputs: object = None,
        outputs: object = None,
        example: object = None,
        capture: Capture = Capture.WHOLE,
    ) -> G:
        """Read and canonicalize a model. `inputs` are names, or example arrays."""
        spec = InputSpec.from_arguments(inputs, outputs, example).without_shapes(self.title)
        model = self.read_model(source, spec)
        return replace(
            model, warnings=(*model.warnings, *unused_capture_warning(self.title, capture))
        )

    def prepare(self, model: G) -> None:
        """Compile the graph."""
        model.get_runner()

    def predict(self, model: G, inputs: object) -> Any:
        """Return outputs as arrays."""
        return model.signature.pack_outputs(model.run(model.signature.bind_inputs(inputs)))

    def example_inputs(self, model: G, batch_size: int | None = None) -> Any:
        """Return a tuple in input order: the example of the data, or synthetic inputs."""
        return model.signature.in_order(model.example, batch_size)


def cast_saturating(values: Array, dtype: np.dtype[Any] | str) -> Array:
    """Cast values to a 16-bit dtype, or that of a name, saturating at its largest finite value.

    Many masks use the lowest float32 in place of minus infinity, which must not become infinite.
    """
    import ml_dtypes  # registers bfloat16; comes with other frameworks than PyTorch

    with np.errstate(over="ignore"):
        low = values.astype(dtype)
    lost = np.isfinite(values) & ~np.isfinite(low.astype(np.float32))
    if not lost.any():
        return low
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.where(lost, np.copysign(largest, values).astype(dtype), low)


#: The variants of a tensor, also used as name suffixes.
FP32, BF16, FP16, UINT8 = "fp32", "bf16", "fp16", "uint8"
VARIANT_OF: Mapping[Precision, str] = {Precision.BF16: BF16, Precision.FP16: FP16}
#: Names of the dtypes of constants.
_NARROW = {BF16: "bfloat16", FP16: "float16"}
#: A framework's tensor: its name, or an object.


class TensorVariants(ABC, Generic[T]):
    """The variants in the converted graph of every tensor of the unconverted graph.

    A tensor without a `set_variant` call exists in FP32, as in the unconverted graph. A framework
    inserts the conversions and counts them.

    Args:
        flow: the quantized tensors of the plan.
        ranges: scale owner (`flow.scale_owner`) → the range that its scale must cover.
    """

    #: The variants that a dequantization can produce.
    dequantized_to: ClassVar[tuple[str, ...]] = (FP32,)

    def __init__(self, flow: QuantizationFlow, ranges: Mapping[str, Range]) -> None:
        self._encodings = {
            tensor: QuantParams.of(ranges[root]) for tensor, root in flow.scale_owner.items()
        }
        self._found: dict[T, dict[str, T]] = {}
        self._counted: Counter[str] = Counter()

    @property
    def counts(self) -> ConversionCounts:
        """The number of inserted conversions."""
        return ConversionCounts(**self._counted)

    def count_conversion(self, conversion: str) -> None:
        """Count an inserted conversion, a field of `ConversionCounts`."""
        self._counted[conversion] += 1

    def get_quant_params(self, tensor: T) -> QuantParams:
        """Return the uint8 quantization parameters of a tensor."""
        return self._encodings[self.name_of(tensor)]

    def find_variants(self, tensor: T) -> dict[str, T]:
        """Return the existing variants of a tensor."""
        return self._found.setdefault(tensor, {FP32: tensor})

    def set_variant(self, tensor: T, variant: str, value: T) -> None:
        """Set a variant as the only one of a tensor."""
        self._found[tensor] = {variant: value}

    def get_computed_result(self, tensor: T) -> tuple[T, QuantParams | None]:
        """Return a tensor as computed, and its quantization parameters if in uint8."""
        variant, value = next(iter(self.find_variants(tensor).items()))
        return value, self.get_quant_params(tensor) if variant == UINT8 else None

    def is_stored(self, tensor: T) -> bool:
        """Whether the uint8 variant of a tensor exists."""
        return UINT8 in self.find_variants(tensor)

    def as_float(self, tensor: T, variant: str = FP32) -> T:
        """Return a tensor in FP32, BF16 or FP16."""
        variants = self.find_variants(tensor)
        if variant not in variants:
            variants[variant] = self._make_variant(tensor, variant, variants)
        return variants[variant]

    def as_uint8(self, tensor: T) -> T:
        """Return a tensor in uint8."""
        variants = self.find_variants(tensor)
        if UINT8 not in variants:
            variants[UINT8] = self.insert_quantize(tensor, self.as_float(tensor))
        return variants[UINT8]

    def _make_variant(self, tensor: T, variant: str, variants: Mapping[str, T]) -> T:
        array = self.get_constant_value(tensor)
        if array is not None:
            return self.insert_16_bit_constant(
                tensor, variant, cast_saturating(array, _NARROW[variant])
            )
        source = next((name for name in (FP32, BF16, FP16) if name in variants), None)
        if source is None and variant in self.dequantized_to:
            return self.insert_dequantize(tensor, variant)
        return self.insert_cast(tensor, source or FP32, variant)

    @abstractmethod
    def name_of(self, tensor: T) -> str:
        """Return the name of a tensor in plans."""

    @abstractmethod
    def get_constant_value(self, tensor: T) -> Array | None:
        """Return the value of a constant; None for a computed tensor."""

    @abstractmethod
    def insert_16_bit_constant(self, tensor: T, variant: str, values: Array) -> T:
        """Insert a 16-bit copy of a constant."""

    @abstractmethod
    def insert_cast(self, tensor: T, source: str, variant: str) -> T:
        """Insert a cast of a tensor from one float variant to another."""

    @abstractmethod
    def insert_quantize(self, tensor: T, real: T) -> T:
        """Insert a quantization of a tensor's FP32 variant."""

    @abstractmethod
    def insert_dequantize(self, tensor: T, variant: str) -> T:
        """Insert a dequantization of a uint8 tensor to one of `dequantized_to`."""
