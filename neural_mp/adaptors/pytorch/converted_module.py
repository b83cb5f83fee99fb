"""Converted models in user code: modules to call, copy and compile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from neural_mp.adaptors.pytorch.decoders.transformers_folder import StoredConfig
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import check_inputs, input_keywords
from neural_mp.adaptors.pytorch.graph.fusion import find_only_user, is_node
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import ADD, LINEAR
from neural_mp.adaptors.pytorch.graph.stand_ins import StandIn
from neural_mp.adaptors.pytorch.kernels.direct_calls import DirectGraph
from neural_mp.adaptors.pytorch.kernels.lowering import lower_to_kernels
from neural_mp.adaptors.pytorch.versions import disable_compilation, with_code
from neural_mp.errors import ConversionError, make_pickling_error
from neural_mp.util.labels import without_labels

_HIDDEN = "neural_mp_hidden"
_FUSED_AND_ADDED = (torch.ops.aten.relu.default, torch.ops.aten.gelu.default)


class ConvertedModule(StandIn):
    """A model converted according to a plan; inference only.

    Runs integer kernels that need no compiler, also within `torch.compile`, which cannot inspect
    packed weights. `CompiledModule` exposes a form that the compiler can fuse.

    Attributes:
        portable: graph of float ops, casts and quantize/dequantize pairs; holds the weights.
        runnable: graph that runs; shares the weights.
    """

    portable: GraphModule
    runnable: GraphModule
    _direct: DirectGraph

    def __init__(self, portable: GraphModule, runnable: GraphModule, config: object = None) -> None:
        super().__init__()
        self._config = config
        self.portable = portable
        # Not a submodule, so weights are counted and moved once, in the portable form.
        object.__setattr__(self, "runnable", runnable)
        object.__setattr__(self, "_direct", DirectGraph(runnable, portable))
        self.training = False

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the model like the original; drop labels absent at capture."""
        fed = without_labels(kwargs, input_keywords(self.runnable)) if kwargs else {}
        return _run_direct(self._direct, args, fed)

    def train(self, mode: bool = True) -> ConvertedModule:
        """Stay in inference mode: a captured graph has no other."""
        return self

    @property
    def config(self) -> Any:
        """The configuration of the `transformers` model; None for other modules."""
        if isinstance(self._config, StoredConfig):
            self._config = self._config.build_config()
        return self._config

    @property
    def device(self) -> torch.device:
        """The device of the kernels, as `transformers` pipelines ask for."""
        return torch.device("cpu")

    def can_generate(self) -> bool:
        """Return False: a graph computes one step, and keeps no cache."""
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedModule:
        # The kernels' packed weights cannot be copied, so pack them again.
        portable = copy.deepcopy(self.portable, memo)
        copied = ConvertedModule(portable, lower_to_kernels(portable), self._config)
        return copied if self._layer is None else copied.stand_for(self._layer, portable)

    def __reduce__(self) -> Any:
        raise make_pickling_error("a converted model")

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> ConvertedModule:
        """Apply a function to all tensors; `to`, `half` and others of `nn.Module` call this.

        Raises:
            ConversionError: the function changes the element type or the device, which packed
                weights and scales cannot follow.
        """
        tensors = [*self.parameters(), *self.buffers()]
        for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
            sample = fn(torch.empty(0, dtype=dtype, device=device))
            if (sample.dtype, sample.device) != (dtype, device):
                raise ConversionError(
                    f"a converted model must keep its element types and its device, as its "
                    f"kernels hold packed weights; got {sample.dtype} on {sample.device} for "
                    f"{dtype} on {device}. Inputs of other float types are accepted by result(x); "
                    f"for other weights, change the original model and convert it once more"
                )
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        raise ConversionError(
            "weights cannot be loaded into a converted model, as its kernels hold packed weights "
            "and scales; call load_state_dict of the original model and convert it once more, or "
            "use OptimizedModel.save and neural_mp.load"
        )


def wrap_as_module(model: TorchModel) -> nn.Module:
    """Return the converted model as an `nn.Module`."""
    return model.assemble_parts(
        lambda part: ConvertedModule(part.portable, part.runnable, model.config),
        model.converted_parts,
    )


@disable_compilation
def _run_direct(direct: DirectGraph, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    return direct(*args, **kwargs)


_NEEDS_COMPILER = (
    "torch.compile compiles at the first call of each input shape, also after loading, and "
    "requires a C++ compiler there"
)


def make_compilable_form(portable: GraphModule) -> GraphModule:
    """Convert the pairs to torch's own ops, which its compiler fuses into integer kernels."""
    module = fx.copy_graph_shallowly(portable)
    _hide_unfusable(module)
    _use_own_ops_of_torch(module)
    module._forward_pre_hooks.clear()  # the sizes are checked outside the compiled code
    module.graph.lint()
    module.recompile()
    return module


def make_standalone_form(portable: GraphModule) -> GraphModule:
    """Convert the pairs to torch's own ops, for programs that run without this package.

    Raises:
        ConversionError: an op has no form in torch's own ops.
    """
    module = fx.copy_graph_shallowly(portable)
    _use_own_ops_of_torch(module)
    for node in module.graph.nodes:
        if str(getattr(node.target, "namespace", "")) == ops.LIBRARY:
            raise ConversionError(
                f"{fx.get_op_type(node)} of {fx.get_tensor_name(node)!r} cannot be written to a "
                ".pt2 file, as torch has no such op: dynamic ranges, experts and 4-bit weights "
                "require neural-mp; save a folder"
            )
    module.graph.lint()
    module.recompile()
    return module


def _use_own_ops_of_torch(module: GraphModule) -> None:
    """Replace our ops by those of torch in place, except for hidden pairs and dynamic ranges."""
    from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the ops

    theirs = torch.ops.quantized_decomposed
    for node in list(module.graph.nodes):
        if node.target is ops.quantize:
            node.target = theirs.quantize_per_tensor.default
            node.args = (*node.args, 0, 255, torch.uint8)
        elif node.target is ops.dequantize and not node.meta.get(_HIDDEN):
            node.target = theirs.dequantize_per_tensor.default
            node.args, dtype = (*node.args[:3], 0, 255, torch.uint8), node.args[3]
            node.kwargs = {} if dtype is torch.float32 else {"out_dtype": dtype}
        elif node.target is ops.dequantize_weight:
            integers, scales = node.args
            values = fx.get_constant(module, scales)
            assert values is not None
            zeros = torch.zeros(values.numel(), dtype=torch.long)
            zero_points = fx.add_constant(module, f"{node.name}_zero_points", zeros, node)
            node.target = theirs.dequantize_per_channel.default
            node.args = (integers, scales, zero_points, 0, -127, 127, torch.int8)


def _hide_unfusable(module: GraphModule) -> None:
    """Hide from the compiler, behind opaque ops, patterns that it fails to compile.

    Single-channel images, for which compiler and kernel disagree on the memory layout; and a dense
    layer followed by ReLU or GELU whose result is an operand of an addition.
    """
    for node in list(module.graph.nodes):
        if node.target is ops.dequantize:
            shape = node.meta["val"].shape
            node.meta[_HIDDEN] = len(shape) > 2 and shape[1] == 1
        elif node.target is LINEAR and is_node(node.args[0], ops.dequantize):
            activation = find_only_user(node)
            if activation is None or activation.target not in _FUSED_AND_ADDED:
                continue
            if any(user.target is ADD for user in activation.users):
                pair = node.args[0]
                with module.graph.inserting_before(node):
                    duplicate = module.graph.call_function(ops.dequantize, pair.args)
                duplicate.meta = {**pair.meta, _HIDDEN: True}
                node.replace_input_with(pair, duplicate)


def compile_parts(model: TorchModel) -> nn.Module:
    """Return the model with each of its parts as a `CompiledModule`."""
    return model.assemble_parts(lambda part: CompiledModule(part.portable))


def enable_compiler(model: TorchModel) -> TorchModel:
    """Return the model whose calls run through `torch.compile`."""
    return replace(model, compiles=True, warnings=(*model.warnings, _NEEDS_COMPILER))


def explain_missing_compiler() -> str:
    """Return why `torch.compile` cannot be used here; empty if it can."""
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler:
        return "torch.compile requires a C++ compiler, and none is installed"
    return ""


class CompiledModule(StandIn):
    """The portable form of a model, run through `torch.compile`; needs a C++ compiler.

    Weights are frozen, which the compiler requires to fuse pairs into integer kernels.
    """

    def __init__(self, portable: GraphModule) -> None:
        super().__init__()
        self._portable = portable
        self._compiled = torch.compile(with_code(make_compilable_form(portable)))

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the model; the first call with a given shape compiles."""
        from torch._inductor import config

        check_inputs(self._portable, args, kwargs)
        with torch.no_grad(), config.patch(freezing=True, force_layout_optimization=True):
            return self._compiled(*args, **kwargs)
