"""The adaptor of targets: plans for an accelerator, written as ONNX files, simulated on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common import conversion, optional
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights
from neural_mp.adaptors.onnxrt.base import OnnxGraphAdaptor
from neural_mp.adaptors.onnxrt.files import loading, storage
from neural_mp.adaptors.onnxrt.graph.edit import GraphNames, is_float32
from neural_mp.adaptors.onnxrt.graph.opset import get_onnx_opset
from neural_mp.adaptors.onnxrt.graph.sessions import CPU
from neural_mp.adaptors.onnxrt.kernels.ops import is_dequantize, is_quantize
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.targets.model import (
    TargetModel,
    build_graph,
    build_op_capabilities,
    count_op_work,
)
from neural_mp.adaptors.onnxrt.targets.qdq_structure import Pair, format_type_name
from neural_mp.adaptors.onnxrt.targets.qdq_writer import corrects_bias, write_qdq
from neural_mp.adaptors.onnxrt.targets.quantization import (
    choose_joined_ranges,
    ranges_by_algorithm,
)
from neural_mp.adaptors.onnxrt.targets.rewrites import (
    RewrittenGraph,
    rewrite_for,
    with_static_shapes,
)
from neural_mp.adaptors.onnxrt.targets.switch_model import (
    NoiseProbe,
    build_switch_model,
    measure_noise,
)
from neural_mp.amp import FourLists
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import KeptOutputs, Observations, Range, WidthFigures
from neural_mp.core.op_timings import OpTrace
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.errors import ConversionError
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.targets import TargetProfile
from neural_mp.util.noise import noise_and_signal
from neural_mp.util.system.memory import pause_garbage_collection

logger = logging.getLogger(__name__)

#: Samples of a batch on which the noise of single tensors is measured, at most.
MAX_PROBED_SAMPLES = 4
#: SQNR in dB that a rewritten graph must reach, and one with clipped masks.
_LEAST_EXACT_DB, _LEAST_CLIPPED_DB = 80.0, 30.0


class TargetAdaptor(OnnxGraphAdaptor[TargetModel]):
    """The adaptor of a target.

    Args:
        profile: the rules of the target.
    """

    graph = staticmethod(build_graph)

    def __init__(self, profile: TargetProfile) -> None:
        self.profile = profile
        self.single_file = optional.SingleFile((".onnx",), save_static)

    def read_model(self, source: object, spec: InputSpec) -> TargetModel:
        """Read, canonicalize and rewrite a model."""
        with pause_garbage_collection():
            model = loading.load_model(source, spec, CPU)
        if model.obstacle is not None:
            raise ConversionError(f"the model cannot be written for a target: {model.obstacle}")
        rewritten = rewrite_for(model.program, self.profile)
        try:
            return self._wrap_rewritten(model, rewritten, exact=not rewritten.notes)
        except ConversionError:
            if not rewritten.notes:
                raise
            logger.debug("masks are no masks", exc_info=True)
        plain = rewrite_for(model.program, self.profile, clips_masks=False)
        return self._wrap_rewritten(model, plain, exact=True)

    def _wrap_rewritten(
        self, model: OnnxModel, rewritten: RewrittenGraph, exact: bool
    ) -> TargetModel:
        target = replace(
            self._with_profile(model),
            program=rewritten.program,
            opset=get_onnx_opset(rewritten.program),
            warnings=(*model.warnings, *rewritten.notes),
            quantized=None,
            kernel_check=None,
            _runners={},
        )
        self._check_rewriting(target, exact)
        return target

    def _with_profile(self, model: OnnxModel) -> TargetModel:
        state = {item.name: getattr(model, item.name) for item in fields(OnnxModel)}
        return TargetModel(**state, profile=self.profile)

    def _check_rewriting(self, target: TargetModel, exact: bool) -> None:
        """Compare the rewritten graph with the given one, on the example.

        Raises:
            ConversionError: the outputs differ by more than rounding, or, with clipped masks, by
                more than masks may.
        """
        expected = target.run(target.example)
        outputs = target.signature.output_tensors
        actual = target.create_session(target.program).make_fetcher(outputs)(target.example)
        least = _LEAST_EXACT_DB if exact else _LEAST_CLIPPED_DB
        for name, before, after in zip(outputs, expected, actual, strict=True):
            if before.dtype.kind != "f":
                continue
            finite = np.isfinite(before) & np.isfinite(after)
            noise, signal = noise_and_signal(before[finite], after[finite])
            if noise > signal * 10 ** (-least / 10):
                raise ConversionError(
                    f"the graph rewritten for {self.profile.title} must compute the output "
                    f"{name!r} with at least {least:g} dB, and does not; give the model without "
                    f"the ops that the profile rewrites: {', '.join(self.profile.rewrites)}"
                )

    def kernels(self, model: TargetModel, hardware: Hardware) -> Mapping[str, OpKernels]:
        """Return no kernel: `space` reads the profile."""
        return {}

    def space(
        self,
        model: TargetModel,
        hardware: Hardware,
        lists: Mapping[Precision, FourLists] | None = None,
    ) -> TuningSpace:
        """Return the graph with the widths that the target computes every op in."""
        return TuningSpace(self.graph(model), build_op_capabilities(model))

    def observe(
        self,
        model: TargetModel,
        batches: Iterable[Any],
        space: TuningSpace,
        collected: KeptOutputs | None = None,
    ) -> Observations:
        """Observe every float tensor, since a plan may store each in integers."""
        values = model.structure.values.items()
        tensors = frozenset(name for name, value in values if is_float32(value))
        return conversion.collect_observations(self, model, batches, space, collected, tensors)

    def convert(
        self,
        model: TargetModel,
        plan: ResolvedPlan,
        observations: Observations,
        space: TuningSpace,
        corrected: CorrectedWeights[TargetModel] | None = None,
    ) -> TargetModel:
        """Return the model with pairs of Q/DQ ops; `model` itself for an all-float plan."""
        if not any(config.activation for config in plan.plan.values()):
            return model
        graph, configs = model.program.graph, _select_integer_configs(plan)
        observed = _map_observed_ranges(model, observations)
        ranges = choose_joined_ranges(graph, observed, configs, self.profile)
        return self._write_qdq(model, configs, ranges, _map_channel_means(model, observations))

    def convert_graph(
        self, model: TargetModel, plan: ResolvedPlan, ranges: Mapping[str, Range]
    ) -> TargetModel:
        """Return the model with pairs of Q/DQ ops, from value of the graph → range."""
        return self._write_qdq(model, _select_integer_configs(plan), ranges, {})

    def _write_qdq(
        self,
        model: TargetModel,
        configs: Mapping[str, OpConfig],
        ranges: Mapping[str, Range],
        means: Mapping[str, Array],
    ) -> TargetModel:
        program, counts = write_qdq(model.program, configs, ranges, self.profile, means)
        return replace(model, program=program, given=None, counts=counts, _runners={})

    def width_figures(
        self, model: TargetModel, inputs: object, observations: Observations
    ) -> WidthFigures:
        """Return the noise of every tensor and weight on one batch, and the work of every op."""
        switched = build_switch_model(
            model.program,
            model.searched_configs,
            ranges_by_algorithm(
                model.program.graph, _map_observed_ranges(model, observations), self.profile
            ),
            model.tensor_names,
            self.profile,
        )
        stages = switched.make_stages(
            lambda program, outputs: model.create_session(program).make_fetcher(outputs)
        )
        tensors, weights = measure_noise(switched, stages, _probes_of(model, inputs))
        means = _map_channel_means(model, observations)
        nodes = model.structure.nodes.items()
        biases = tuple(op for op, node in nodes if corrects_bias(node, means))
        return WidthFigures(tensors, weights, *self.op_work(model, inputs), biases)

    def op_work(
        self, model: TargetModel, inputs: object
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the work of every op, from the sizes of one batch."""
        feeds = model.signature.bind_inputs(inputs)
        static = with_static_shapes(model.program, feeds)
        return count_op_work(static, max(1, model.signature.count_samples(feeds)))

    def trace_kernels(self, model: TargetModel, inputs: object) -> Mapping[str, OpTrace]:
        """Raise: the kernels of a simulation say nothing about the target."""
        raise ConversionError(
            f"the kernels of {self.profile.title} are known to its compiler only; save the result "
            f"as model.onnx, and run: neural-mp audit model.onnx --target {self.profile.name}"
        )

    def native(self, model: TargetModel) -> Any:
        """Return the ONNX message, with static sizes where the target needs them."""
        return storage.to_message(make_static_form(model))

    def save(self, model: TargetModel, folder: Path) -> None:
        """Write the model with the sizes of the example, and its metadata."""
        storage.save_model(make_static_form(model), folder)

    def restore(self, folder: Path) -> TargetModel:
        """Read back the files of `save`."""
        return self._with_profile(storage.restore_model(folder, CPU))

    def export_onnx(self, model: TargetModel, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the model as to a single file."""
        save_static(model, path, metadata)


def _probes_of(model: TargetModel, inputs: object) -> tuple[NoiseProbe, NoiseProbe]:
    """Return the most typical sample of a batch, and the most typical few."""
    feeds = model.signature.bind_inputs(inputs)
    samples = model.signature.count_samples(feeds)
    order = _rank_samples(feeds, samples)

    def first(count: int) -> NoiseProbe:
        if count >= samples:
            return NoiseProbe(feeds, samples)
        return NoiseProbe({name: feeds[name][order[:count]] for name in feeds}, count)

    return first(1), first(MAX_PROBED_SAMPLES)


def _rank_samples(feeds: Mapping[str, Array], samples: int) -> list[int]:
    """Return samples by their magnitude, the median first, as an outlier would hide the others."""
    arrays = [np.abs(a).reshape(samples, -1) for a in feeds.values() if a.dtype.kind == "f"]
    magnitudes = np.zeros(samples)
    for array in arrays:
        magnitudes += array.mean(1, dtype=np.float64) / (array.mean() or 1)
    ranks = np.argsort(np.argsort(magnitudes, kind="stable"))
    return [int(index) for index in np.argsort(np.abs(ranks - samples // 2), kind="stable")]


def _select_integer_configs(plan: ResolvedPlan) -> dict[str, OpConfig]:
    """Return op → its config, for ops in integers."""
    return {op: config for op, config in plan.plan.items() if config.activation is not None}


def _map_observed_ranges(
    model: TargetModel, observations: Observations
) -> dict[str, Mapping[str, Range]]:
    """Return value of the graph → calibration algorithm → the observed range of its tensor."""
    ranges = observations.ranges
    return {value: ranges[name] for value, name in model.tensor_names.items() if name in ranges}


def _map_channel_means(model: TargetModel, observations: Observations) -> dict[str, Array]:
    """Return value of the graph → the mean of each channel, for tensors whose channels are kept."""
    channels = observations.channels
    return {
        value: np.asarray(channels[name].mean)
        for value, name in model.tensor_names.items()
        if name in channels
    }


def make_static_form(model: TargetModel) -> TargetModel:
    """Return a model with the sizes of one example sample, if the target needs static sizes."""
    if model.target_profile.shapes != "static":
        return model
    example = model.signature.bind_inputs(model.signature.in_order(model.example, 1))
    return replace(model, program=with_static_shapes(model.active_graph, example), given=None)


def save_static(model: TargetModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the model with static sizes, and integers at its ends if so placed, to one file."""
    static = make_static_form(model)
    if model.target_profile.placement.io == "quantized":
        program = static.active_graph.clone()
        metadata = {**metadata, **quantize_io(program)}
        static = replace(static, program=program, given=None)
    storage.save_file(static, path, metadata)


#: Start of the keys of the metadata, before the name of an input or output: its type, scale and
#: zero point.
IO_KEY = "neural_mp.io."


def quantize_io(program: ir.Model) -> dict[str, str]:
    """Replace float inputs and outputs by the integers behind and before them, in place.

    Returns:
        Metadata with type, scale and zero point of each; values that an op in float reads or
        computes stay floats, and have none.
    """
    names, metadata = GraphNames(program.graph), dict[str, str]()
    pairs = [*_quantize_inputs(program.graph, names), *_return_integers(program.graph, names)]
    for name, pair in pairs:
        zero = 0 if pair.zero_point is None else int(pair.zero_point.reshape(-1)[0])
        metadata[f"{IO_KEY}{name}"] = f"{format_type_name(pair.dtype)} {pair.first_scale!r} {zero}"
    return metadata


def _quantize_inputs(graph: ir.Graph, names: GraphNames) -> list[tuple[str, Pair]]:
    """Feed the integers of each input that is only quantized, of several widths the widest."""
    replaced = []
    for position, value in enumerate(graph.inputs):
        readers = {use.node for use in value.uses()}
        if not readers or not all(is_quantize(n) and n.inputs[0] is value for n in readers):
            continue
        pairs = map(Pair.from_node, readers)
        pair = max(pairs, key=lambda item: 0 if item.dtype is None else item.dtype.bitwidth)
        rounding = pair.node
        if not pair.is_per_tensor or pair.zero_point is None:
            continue
        name, integers = str(value.name), rounding.outputs[0]
        value.name = names.reserve_name(f"{name}/float")
        fed = ir.val(name, pair.dtype, value.shape)
        graph.inputs[position] = fed
        integers.replace_all_uses_with(fed, replace_graph_outputs=True)
        graph.remove(rounding, safe=True)
        if value.uses():
            plain = ir.val(names.reserve_name(f"{name}/dequantized"), value.dtype, value.shape)
            node = ir.node(
                "DequantizeLinear",
                [fed, *rounding.inputs[1:]],
                outputs=[plain],
                name=names.reserve_name(f"{name}/input"),
            )
            graph.insert_before(next(iter(graph)), node)
            value.replace_all_uses_with(plain)
        replaced.append((name, pair))
    return replaced


def _return_integers(graph: ir.Graph, names: GraphNames) -> list[tuple[str, Pair]]:
    """Return the integers of each output that is dequantized at the end."""
    replaced = []
    for position, value in enumerate(graph.outputs):
        last = value.producer()
        if last is None or not is_dequantize(last) or last.inputs[0] is None:
            continue
        integers, pair = last.inputs[0], Pair.from_node(last)
        if integers.producer() is None or integers.is_graph_output():
            continue
        if pair.dtype is None or not pair.is_per_tensor:
            continue
        name = str(value.name)
        value.name = names.reserve_name(f"{name}/float")
        integers.name, integers.dtype, integers.shape = name, pair.dtype, value.shape
        graph.outputs[position] = integers
        if not value.uses():
            graph.remove(last, safe=True)
        replaced.append((name, pair))
    return replaced
