"""Conversion of a model to the precisions of a plan, by a recipe of AI Edge Quantizer.

Integer kernels read and write INT8 tensors of the graph, so the quantizer changes their types and
inserts QUANTIZE and DEQUANTIZE where a neighbour is float. All ranges are those of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.signatures.signature import Signature
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.litert.graph.outputs import (
    quantize_unread_results,
    restore_outputs,
    set_outputs_aside,
)
from neural_mp.adaptors.litert.graph.ports import read_encoding, with_integer_ports
from neural_mp.adaptors.litert.graph.program import Program
from neural_mp.adaptors.litert.model import LiteRtModel, Recipe, Structure
from neural_mp.adaptors.litert.observe import observe_values
from neural_mp.adaptors.litert.ops import get_op_row
from neural_mp.adaptors.litert.quantizer import (
    DYNAMIC,
    HALF,
    STATIC,
    WEIGHT,
    Form,
    Kind,
    Step,
    make_recipe,
    quantize_tree,
)
from neural_mp.core.enums import Granularity, KernelInputs
from neural_mp.core.int8_accumulation import FULL_RANGE, WEIGHT_LIMITS
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConversionError
from neural_mp.space import ResolvedPlan
from neural_mp.util.pytree import Array


def convert_graph(
    model: LiteRtModel, plan: ResolvedPlan, ranges: Mapping[str, Range]
) -> LiteRtModel:
    """Return a model with the integer ops of a plan."""
    structure = model.structure
    steps = list(_iterate_steps(structure, plan))
    spans = {tensor: ranges[owner] for tensor, owner in plan.flow.scale_owner.items()}
    limits = dict(_iterate_weight_limits(structure, model.weight_scales))
    recipe = Recipe(make_recipe(steps), _complete_ranges(structure, steps, spans), limits)
    program = quantize_program(model.program, recipe)
    return replace(
        model,
        program=program,
        signature=_rename_ports(model.signature, model.program, program),
        given=None,
        results=dict(_iterate_results(structure, program)),
        counts=count_conversions(program),
        recipe=recipe,
        _runners={},
    )


def with_integer_io(model: LiteRtModel, batches: Iterable[Any]) -> LiteRtModel:
    """Return a model whose graph takes and returns INT8, and that is called with floats.

    Batches give the ranges of inputs and outputs that the graph has in float only.

    Raises:
        ConversionError: such values are not finite.
    """
    ports = (*model.signature.inputs, *model.signature.outputs)
    ranges: dict[str, Range] = {}
    for name, values in observe_values(model, batches, {port.tensor for port in ports}):
        low, high = ranges.get(name, (0.0, 0.0))
        ranges[name] = min(low, float(values.min())), max(high, float(values.max()))
        if not np.isfinite(ranges[name]).all():
            raise ConversionError(
                f"values of {name!r} must be finite for INT8 inputs and outputs, got NaN or Inf; "
                f"calibrate with other data"
            )
    program = with_integer_ports(model.program, ranges)
    positions, tensors = Structure(program).tensors, program.main.tensors
    results = {
        op: replace(location, encoding=read_encoding(tensors[positions[location.tensor]]))
        for op, location in model.results.items()
    }
    return replace(
        model,
        program=program,
        signature=_rename_ports(model.signature, model.program, program),
        given=None,
        results=results,
        counts=count_conversions(program),
        _runners={},
    )


def quantize_program(program: Program, recipe: Recipe) -> Program:
    """Return a graph with the ops of a recipe in integers, and outputs in float.

    Raises:
        ConversionError: the quantizer refuses the recipe.
    """
    bare, aside = set_outputs_aside(program)
    converted = Program.wrap(quantize_tree(bare.tree, recipe.entries, recipe.statistics))
    restore_outputs(converted, aside)
    quantize_unread_results(converted)
    return converted


def _rename_ports(signature: Signature, program: Program, converted: Program) -> Signature:
    """Return a signature with the tensors of a converted graph, whose order is the same."""
    names = {
        program.tensor_name(int(old)): converted.tensor_name(int(new))
        for side in ("inputs", "outputs")
        for old, new in zip(getattr(program.main, side), getattr(converted.main, side), strict=True)
    }
    inputs, outputs = (
        tuple(replace(port, tensor=names[port.tensor]) for port in ports)
        for ports in (signature.inputs, signature.outputs)
    )
    return replace(signature, inputs=inputs, outputs=outputs)


def _iterate_steps(structure: Structure, plan: ResolvedPlan) -> Iterator[Step]:
    """Yield the ops that run in integers, or read a weight in fewer bits than FP32."""
    flow = plan.flow
    for name in structure.ops:
        config, precision = plan.plan.get(name), plan.effective[name]
        if config is not None and config.weight is not None and config.activation is None:
            yield Step(structure.get_scope(name), find_form(structure, name, config.weight))
        elif precision is Precision.INT8 and name in flow.int8_reads:
            yield Step(structure.get_scope(name), STATIC)
        elif precision is Precision.FP16:
            yield Step(structure.get_scope(name), HALF)


def find_form(structure: Structure, name: str, weight: QuantSpec) -> Form:
    """Return the form of a layer or table whose weight alone is in integers.

    A group of all inputs of a channel is the form by channel. Rows with one scale for all leave the
    table in INT8.
    """
    if weight.granularity is Granularity.PER_TENSOR:
        return STATIC
    size = weight.group_size
    is_by_channel = size is None or size >= structure.get_weight(name)[0].size
    stays = structure.has_table(name) or weight.inputs is KernelInputs.INT8
    form = DYNAMIC if stays else WEIGHT
    return replace(form, bits=weight.dtype.bits, block=None if is_by_channel else size)


def _complete_ranges(
    structure: Structure, steps: list[Step], spans: Mapping[str, Range]
) -> dict[str, Range]:
    """Return the range of every tensor that an op in INT8 reads or writes.

    Further results of an op have the range of the first, which the op moves. Rows have that of all
    rows of their table.
    """
    scopes = {structure.get_scope(name): name for name in structure.ops}
    complete = dict(spans)
    for step in steps:
        name = scopes[step.scope]
        if step.form is STATIC and structure.has_table(name):
            table = structure.get_weight(name)
            low, high = complete.get(name, (0.0, 0.0))
            complete[name] = min(low, float(table.min())), max(high, float(table.max()))
        elif step.form.kind is Kind.STATIC:
            for index in structure.iterate_float_tensors(name):
                tensor = structure.program.tensor_name(index)
                complete.setdefault(tensor, spans[name])
    return complete


def _iterate_weight_limits(
    structure: Structure, scales: Mapping[str, Array]
) -> Iterator[tuple[str, Array]]:
    """Yield weight → largest magnitude of each channel, for layers with given scales."""
    for name, scale in scales.items():
        if name in structure.ops and structure.has_weight(name):
            axis, weight = get_op_row(structure.get_type(name)).outputs, structure.get_weight(name)
            sizes = [1] * weight.ndim
            sizes[axis] = weight.shape[axis]
            limit = WEIGHT_LIMITS[FULL_RANGE] * np.reshape(scale, sizes)
            yield structure.program.tensor_name(structure.find_weight(name)), limit


def with_weight_scales(model: LiteRtModel, scales: Mapping[str, Array]) -> LiteRtModel:
    """Return the model whose next conversion stores some INT8 weights with given scales."""
    return replace(model, weight_scales=dict(scales), _runners={})


def _iterate_results(
    structure: Structure, program: Program
) -> Iterator[tuple[str, OutputLocation]]:
    """Yield op → location of its result, which keeps its name in either type."""
    converted = Structure(program)
    for name in (*structure.ops, *structure.parts):
        index = converted.tensors.get(name)
        if index is not None:
            kind = structure.get_type(structure.parts.get(name, name))
            yield name, OutputLocation(name, kind, read_encoding(program.main.tensors[index]))


def count_conversions(program: Program) -> ConversionCounts:
    """Return the conversions of a run; weights that are restored count as dequantized."""
    types = [program.op_type(op) for op in program.iterate_ops()]
    return ConversionCounts(quantize=types.count("QUANTIZE"), dequantize=types.count("DEQUANTIZE"))
