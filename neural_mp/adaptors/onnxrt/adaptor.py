"""The ONNX Runtime adaptor. Its methods import ONNX Runtime, so naming the class costs nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from neural_mp.adaptors.common.channel_scaling import Layer, LayerChange
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.core.byte_products import ByteProducts, KernelKind
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import observable_tensors
from neural_mp.space import Capability, TuningSpace

if TYPE_CHECKING:
    from neural_mp.adaptors.onnxrt.model import OnnxModel

#: Where a user names the execution provider that the model will run on.
PROVIDER_VARIABLE = "NEURAL_MP_ONNX_PROVIDER"
_PACKAGES = ("onnx", "onnx_ir")
_CLASSES = ("ModelProto", "Model")


class OnnxRuntimeAdaptor(Adaptor):
    """ONNX files, messages and their bytes.

    Args:
        provider: the execution provider, as ONNX Runtime calls it; by default what
            `NEURAL_MP_ONNX_PROVIDER` says, else the CPU's.
    """

    framework = "onnxrt"
    file_suffixes: ClassVar[tuple[str, ...]] = (".onnx",)

    def __init__(self, provider: str | None = None) -> None:
        self.provider = provider or os.environ.get(PROVIDER_VARIABLE) or "CPUExecutionProvider"
        self._threads: int | None = None

    @classmethod
    def accepts(cls, source: Any) -> bool:
        """Whether `source` is ONNX's object, or a path that looks like a model."""
        if isinstance(source, str | Path):
            return Path(source).suffix == ".onnx"
        kind = type(source)
        return isinstance(source, bytes | bytearray) or (
            kind.__module__.split(".")[0] in _PACKAGES and kind.__name__ in _CLASSES
        )

    def load(
        self,
        source: Any,
        *,
        inputs: Any = None,
        outputs: Any = None,
        example: Any = None,
        capture: str = "whole",
    ) -> OnnxModel:
        """Read and prepare a model. `inputs` are names, or example arrays."""
        from neural_mp.adaptors.onnxrt.loading import load

        model = load(source, inputs, outputs, example, self.provider)
        if capture == "whole":
            return model
        ignored = f"capture = {capture!r} is not used for ONNX: every model is one graph"
        return replace(model, warnings=(*model.warnings, ignored))

    def graph(self, model: OnnxModel) -> OpGraph:
        """Every op with its edges and fusion group."""
        from neural_mp.adaptors.onnxrt.graph import build_graph

        return build_graph(model)

    def capabilities(self, model: OnnxModel, hardware: Hardware) -> Mapping[str, Capability]:
        """From the kernel registry of the execution provider, and from ONNX's schemas."""
        from neural_mp.adaptors.onnxrt.capabilities import capabilities

        return capabilities(model, hardware)

    def kernel_products(self, hardware: Hardware) -> Mapping[KernelKind, ByteProducts]:
        """See the contract: by trying the largest bytes."""
        from neural_mp.adaptors.common.kernel_products import products_for
        from neural_mp.adaptors.onnxrt.kernel_products import kernel_products

        return products_for(hardware, kernel_products)

    def wide_kernels(self, model: OnnxModel) -> frozenset[KernelKind]:
        """See the contract."""
        from neural_mp.adaptors.onnxrt.weight_range import wide_kernels

        return wide_kernels(model)

    def right_everywhere(self, model: OnnxModel) -> OnnxModel:
        """See the contract: the same weights, unsigned."""
        from neural_mp.adaptors.onnxrt.weight_range import with_unsigned_weights

        return with_unsigned_weights(model)

    def op_types(self) -> Collection[str]:
        """See the contract."""
        from neural_mp.adaptors.onnxrt.kernel_registry import every_op_type

        return every_op_type(self.provider)

    def kinds(self) -> Mapping[str, Collection[str]]:
        """See the contract."""
        from neural_mp.adaptors.onnxrt.op_kinds import TYPES

        return TYPES

    def observe(self, model: OnnxModel, batches: Iterable[Any], space: TuningSpace) -> Observations:
        """Ranges and noise of every tensor that may be quantized."""
        from neural_mp.adaptors.onnxrt.observe import observe

        tensors = observable_tensors(space.graph, space.int8_ops)
        bound = (model.signature.bind(batch) for batch in batches)
        return observe(model, bound, tensors, self._threads)

    def convert(
        self,
        model: OnnxModel,
        plan: PrecisionPlan,
        observations: Observations,
        space: TuningSpace,
    ) -> OnnxModel:
        """Integer kernels, 16-bit types, and conversions where they meet."""
        from neural_mp.adaptors.common.quantized_ranges import quantized_ranges
        from neural_mp.adaptors.common.repair import repaired
        from neural_mp.adaptors.onnxrt.write import convert

        resolved = space.resolve(plan)
        model, observations = repaired(self, model, resolved, observations, space)
        flow = space.flow(resolved)
        if set(flow.precisions.values()) <= {Precision.FP32}:
            return model
        ranges = quantized_ranges(space.graph, flow, resolved, observations)
        written = convert(model.program, model.opset, model.provider, resolved, flow, ranges)
        return replace(
            model,
            program=written.program,
            given=None,
            ops=written.ops,
            counts=written.counts,
            _runners={},
        )

    def layers(self, model: OnnxModel) -> Mapping[str, Layer]:
        """Convolutions, products with constant matrices, layer norms."""
        from neural_mp.adaptors.onnxrt.layer_constants import layers

        return layers(model)

    def with_layers(self, model: OnnxModel, changes: Mapping[str, LayerChange]) -> OnnxModel:
        """See the contract."""
        from neural_mp.adaptors.onnxrt.layer_constants import with_layers

        return with_layers(model, changes)

    def predict(self, model: OnnxModel, inputs: Any) -> Any:
        """Outputs as arrays."""
        results = model.run(model.signature.bind(inputs), self._threads)
        return model.signature.packed(results)

    def example_inputs(self, model: OnnxModel, batch_size: int | None = None) -> Any:
        """A tuple in the order of the inputs: the example of the data, else made up."""
        return model.signature.in_order(model.example, batch_size)

    def native(self, model: OnnxModel) -> Any:
        """A `ModelProto`, with its weights."""
        from neural_mp.adaptors.onnxrt.storage import whole

        return whole(model)

    def profile(self, model: OnnxModel, inputs: Any) -> Mapping[str, float]:
        """Seconds of every op that runs, by name; ops that run along with another are in it."""
        from neural_mp.adaptors.onnxrt.profile import profile

        return profile(model, model.signature.bind(inputs), self._threads)

    def conversion_counts(self, model: OnnxModel) -> ConversionCounts:
        """Of those that were put in; a model's own are not counted."""
        return model.counts

    def size(self, model: OnnxModel) -> int:
        """Bytes of the constants."""
        from neural_mp.adaptors.onnxrt.sessions import bytes_of

        return sum(map(bytes_of, model.runs.graph.initializers.values()))

    def fingerprint(self, model: OnnxModel) -> str:
        """Of all nodes in order, weights included."""
        from neural_mp.adaptors.onnxrt.storage import digest

        return digest(model.runs, hashlib.sha256())

    def first_non_finite(self, model: OnnxModel, inputs: Any) -> str | None:
        """The first op whose result holds NaN or Inf."""
        from neural_mp.adaptors.onnxrt.observe import first_non_finite

        return first_non_finite(model, model.signature.bind(inputs))

    def save(self, model: OnnxModel, path: Path) -> None:
        """An `.onnx` file, and what is needed to take it up again."""
        from neural_mp.adaptors.onnxrt import storage

        storage.save(model, path)

    def save_file(self, model: OnnxModel, path: Path, metadata: Mapping[str, str]) -> None:
        """An `.onnx` file; of more than 2 GB, with its weights in a second file beside it."""
        from neural_mp.adaptors.onnxrt import storage

        storage.save_file(model, path, metadata)

    def export_onnx(self, model: OnnxModel, path: Path, metadata: Mapping[str, str]) -> None:
        """The same as `save_file`: it is ONNX already."""
        self.save_file(model, path, metadata)

    def draw(self, model: OnnxModel, path: Path) -> tuple[Path, ...]:
        """`.onnx` and `.pbtxt`."""
        from neural_mp.adaptors.onnxrt import storage

        return storage.draw(model, path)

    def restore(self, path: Path) -> OnnxModel:
        """Read back what `save` wrote."""
        from neural_mp.adaptors.onnxrt import storage

        return storage.restore(path, self.provider)

    @contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        """Sessions have the number of threads they were made with; others are made for others."""
        before, self._threads = self._threads, count
        try:
            yield
        finally:
            self._threads = before
