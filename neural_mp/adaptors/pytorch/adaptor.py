"""The PyTorch adaptor. Torch is imported by its methods, so naming the class costs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neural_mp.adaptors.common.channel_scaling import Layer, LayerChange
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.core.byte_products import ByteProducts, KernelKind
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.quantization_flow import observable_tensors
from neural_mp.space import Capability, TuningSpace

if TYPE_CHECKING:
    from neural_mp.adaptors.pytorch.convention import Call
    from neural_mp.adaptors.pytorch.model import TorchModel

_SUFFIXES = (".pt2", ".pt", ".pth")


class PyTorchAdaptor(Adaptor):
    """`nn.Module`, `torch.export` programs and their `.pt2` files."""

    framework = "pytorch"

    @classmethod
    def accepts(cls, source: Any) -> bool:
        """Whether `source` is a torch module or program, or a path that looks like one."""
        if isinstance(source, str | Path):
            return Path(source).suffix in _SUFFIXES
        names = {f"{k.__module__.split('.')[0]}.{k.__name__}" for k in type(source).__mro__}
        return bool(names & {"torch.Module", "torch.ExportedProgram"})

    def load(
        self,
        source: Any,
        *,
        inputs: Any = None,
        outputs: Any = None,
        example: Any = None,
        capture: str = "whole",
    ) -> TorchModel:
        """Capture a module, or take in an exported program. `inputs` may hold example tensors."""
        import torch

        from neural_mp.adaptors.pytorch import loading

        with torch.no_grad():
            model = loading.load(source, inputs, example, capture)
        if outputs is None:
            return model
        ignored = "outputs is not used for PyTorch: a module returns what its forward returns"
        return replace(model, warnings=(*model.warnings, ignored))

    def graph(self, model: TorchModel) -> OpGraph:
        """Every op with its edges and fusion group."""
        from neural_mp.adaptors.pytorch.graph import build_graph

        return build_graph(part.portable for part in model.parts.values())

    def capabilities(self, model: TorchModel, hardware: Hardware) -> Mapping[str, Capability]:
        """Found by running every op type once in every precision."""
        from neural_mp.adaptors.pytorch.capabilities import capabilities

        return capabilities(model, hardware)

    def kernel_products(self, hardware: Hardware) -> Mapping[KernelKind, ByteProducts]:
        """See the contract: by trying the largest bytes."""
        from neural_mp.adaptors.common.kernel_products import products_for
        from neural_mp.adaptors.pytorch.kernel_products import kernel_products

        return products_for(hardware, kernel_products)

    def wide_kernels(self, model: TorchModel) -> frozenset[KernelKind]:
        """See the contract."""
        from neural_mp.adaptors.pytorch.weight_range import wide_kernels

        return wide_kernels(model)

    def right_everywhere(self, model: TorchModel) -> TorchModel:
        """See the contract: the weights are rounded once more."""
        from neural_mp.adaptors.pytorch.weight_range import with_reduced_weights

        return with_reduced_weights(model)

    def op_types(self) -> Collection[str]:
        """See the contract."""
        from neural_mp.adaptors.pytorch.op_kinds import every_op_type

        return every_op_type()

    def kinds(self) -> Mapping[str, Collection[str]]:
        """See the contract."""
        from neural_mp.adaptors.pytorch.op_kinds import TYPES

        return TYPES

    def observe(
        self, model: TorchModel, batches: Iterable[Any], space: TuningSpace
    ) -> Observations:
        """Ranges and noise of every tensor that may be quantized."""
        from neural_mp.adaptors.pytorch.observe import observe

        tensors = observable_tensors(space.graph, space.int8_ops)
        return observe(model, (self._call(model, b) for b in batches), tensors)

    def convert(
        self,
        model: TorchModel,
        plan: PrecisionPlan,
        observations: Observations,
        space: TuningSpace,
    ) -> TorchModel:
        """16-bit ops by casts, INT8 ops by quantize/dequantize pairs, then integer kernels."""
        from neural_mp.adaptors.common.quantized_ranges import quantized_ranges
        from neural_mp.adaptors.common.repair import repaired
        from neural_mp.adaptors.pytorch.casts import insert_casts
        from neural_mp.adaptors.pytorch.integer_kernels import runnable_form
        from neural_mp.adaptors.pytorch.model import Part, finish, shallow_copy
        from neural_mp.adaptors.pytorch.write_int8 import insert_quantization

        resolved = space.resolve(plan)
        model, observations = repaired(self, model, resolved, observations, space)
        flow = space.flow(resolved)
        ranges = quantized_ranges(space.graph, flow, resolved, observations)
        parts = {}
        for path, part in model.parts.items():
            portable = shallow_copy(part.portable)
            insert_casts(portable, flow, model.convention.dtype)
            insert_quantization(portable, flow, resolved, ranges)
            finish(portable)
            parts[path] = Part(portable, runnable_form(portable), part.example)
        return replace(model, parts=parts, original=None)

    def layers(self, model: TorchModel) -> Mapping[str, Layer]:
        """Convolutions, dense layers, layer norms."""
        from neural_mp.adaptors.pytorch.layer_constants import layers

        return layers(model)

    def with_layers(self, model: TorchModel, changes: Mapping[str, LayerChange]) -> TorchModel:
        """See the contract."""
        from neural_mp.adaptors.pytorch.layer_constants import with_layers

        return with_layers(model, changes)

    def hessian_traces(
        self, model: TorchModel, batches: Iterable[Any], ops: Collection[str]
    ) -> Mapping[str, float]:
        """By gradients of the captured graph."""
        from neural_mp.adaptors.pytorch.gradients import hessian_traces

        return hessian_traces(model, (self._call(model, batch) for batch in batches), ops)

    def predict(self, model: TorchModel, inputs: Any) -> Any:
        """Outputs as tensors, or as arrays where the inputs were arrays."""
        from torch.utils import _pytree as pytree

        from neural_mp.adaptors.pytorch.convention import is_array, to_arrays
        from neural_mp.adaptors.pytorch.submodules import run_call

        result = run_call(model, model.module, self._call(model, inputs))
        arrays = any(is_array(leaf) for leaf in pytree.tree_leaves(inputs))
        return to_arrays(result) if arrays else result

    def example_inputs(self, model: TorchModel, batch_size: int | None = None) -> Any:
        """The captured example: a tuple of positional inputs, or a dict where there are none."""
        from neural_mp.adaptors.pytorch.convention import resized

        call = model.example if batch_size is None else resized(model.example, batch_size)
        return dict(call.kwargs) if call.kwargs and not call.args else call.args

    def native(self, model: TorchModel) -> Any:
        """The user's own module for an untouched model, else a `ConvertedModule`."""
        from neural_mp.adaptors.pytorch.converted import ConvertedModule

        if model.original is not None:
            return model.original
        return model.built(lambda part: ConvertedModule(part.portable, part.runnable))

    def compiled(self, model: TorchModel) -> Any:
        """A `CompiledModule`."""
        from neural_mp.adaptors.pytorch.converted import CompiledModule

        return model.built(lambda part: CompiledModule(part.portable))

    def export_onnx(self, model: TorchModel, path: Path, metadata: Mapping[str, str]) -> None:
        """By torch's own exporter; INT8 as QuantizeLinear and DequantizeLinear."""
        from neural_mp.adaptors.pytorch.onnx_export import export_onnx

        export_onnx(model, path, metadata)

    def profile(self, model: TorchModel, inputs: Any) -> Mapping[str, float]:
        """Seconds of every op that runs, by name; ops that run along with another are in it."""
        from neural_mp.adaptors.pytorch.profile import profile

        return profile(model, self._call(model, inputs))

    def conversion_counts(self, model: TorchModel) -> ConversionCounts:
        """Of the graph that is run."""
        from neural_mp.adaptors.pytorch import kernel_ops as kernels
        from neural_mp.adaptors.pytorch import quantize_ops as ops
        from neural_mp.adaptors.pytorch.casts import CAST
        from neural_mp.adaptors.pytorch.model import OP_NAME

        # A cast of the user's own bears a name; ours do not.
        ours = [
            node.target
            for part in model.parts.values()
            for node in part.runnable.graph.nodes
            if OP_NAME not in node.meta
        ]
        return ConversionCounts(
            ours.count(CAST),
            ours.count(kernels.quantize_uint8) + ours.count(ops.quantize_dynamic),
            ours.count(kernels.dequantize_uint8),
        )

    def size(self, model: TorchModel) -> int:
        """Bytes of parameters and buffers in the portable form."""
        tensors = self._weights(model).values()
        return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())

    def fingerprint(self, model: TorchModel) -> str:
        """Of the graph's ops in order and every weight."""
        import torch

        digest = hashlib.sha256()
        for part in model.parts.values():
            for node in part.portable.graph.nodes:
                digest.update(f"{node.op} {node.target} {node.name};".encode())
        for name, value in sorted(self._weights(model).items()):
            digest.update(name.encode())
            digest.update(
                value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()

    def first_non_finite(self, model: TorchModel, inputs: Any) -> str | None:
        """The first op of the runnable graph whose result holds NaN or Inf."""
        from neural_mp.adaptors.pytorch.observe import first_non_finite

        return first_non_finite(model, self._call(model, inputs))

    def save(self, model: TorchModel, path: Path) -> None:
        """The portable form, in `torch.export`'s own format."""
        from neural_mp.adaptors.pytorch import storage

        storage.save(model, path)

    def draw(self, model: TorchModel, path: Path) -> tuple[Path, ...]:
        """An exported program, `.pt2`, where the model is one graph, and the code of its graphs."""
        from neural_mp.adaptors.pytorch import storage

        return storage.draw(model, path)

    def restore(self, path: Path) -> TorchModel:
        """Load the portable form and put the integer kernels in."""
        from neural_mp.adaptors.pytorch import storage

        return storage.restore(path)

    @contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        """By torch's own switch."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(count or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _weights(self, model: TorchModel) -> dict[str, Any]:
        module = model.built(lambda part: part.portable)
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def _call(self, model: TorchModel, inputs: Any) -> Call:
        return model.convention.call(inputs)
