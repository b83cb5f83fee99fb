"""Which inputs and results of an op follow its element type, as ONNX's own schemas say."""

from __future__ import annotations

from functools import lru_cache

import onnx
import onnx_ir as ir


@lru_cache(maxsize=1024)
def _schema(op: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return None


def _typed(
    parameters: list[onnx.defs.OpSchema.FormalParameter], variable: str, count: int
) -> set[int]:
    """The positions whose type is a type variable; the last parameter may stand for several."""
    found = set()
    for position in range(count):
        parameter = parameters[min(position, len(parameters) - 1)] if parameters else None
        if parameter is not None and parameter.type_str == variable:
            found.add(position)
    return found


def _variable(schema: onnx.defs.OpSchema) -> str | None:
    """The type variable of an op's first result, if an input has it, too."""
    if not schema.inputs or not schema.outputs:
        return None
    variable = str(schema.outputs[0].type_str)
    return variable if any(item.type_str == variable for item in schema.inputs) else None


def typed_inputs(node: ir.Node, opset: int) -> set[int]:
    """Positions of the inputs that have the element type of the first result."""
    schema = None if node.domain else _schema(node.op_type, opset)
    variable = _variable(schema) if schema is not None else None
    if schema is None or variable is None:
        return set()
    return _typed(list(schema.inputs), variable, len(node.inputs))


def is_function(node: ir.Node, opset: int) -> bool:
    """Whether ONNX defines an op by other ops."""
    schema = None if node.domain else _schema(node.op_type, opset)
    words = ("has_function", "has_context_dependent_function")
    return schema is not None and any(getattr(schema, word) for word in words)


def takes(node: ir.Node, opset: int, dtype: str) -> bool:
    """Whether ONNX defines an op for an element type such as `float16`."""
    schema = None if node.domain else _schema(node.op_type, opset)
    variable = _variable(schema) if schema is not None else None
    if schema is None or variable is None:
        return False
    constraint = next((c for c in schema.type_constraints if c.type_param_str == variable), None)
    return constraint is not None and f"tensor({dtype})" in constraint.allowed_type_strs
