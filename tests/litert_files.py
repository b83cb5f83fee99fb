"""Precisions of the ops in LiteRT files, as LiteRT itself lists tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from neural_mp.core.enums import Approach
from neural_mp.core.precision import Precision
from neural_mp.space import EffectiveOp

#: Dtype of a weight that is restored from integers on every run.
RESTORED = "restored integers"


@dataclass(frozen=True)
class FileOp:
    """An op of a file.

    Attributes:
        kind: its type.
        reads: dtypes of the inputs, without those that are left out.
        writes: dtype of the first result.
    """

    kind: str
    reads: tuple[str, ...]
    writes: str


def list_file_ops(content: bytes) -> dict[str, FileOp]:
    """Return first result → op of the main graph."""
    interpreter = Interpreter(
        model_content=content,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    details = {tensor["index"]: tensor for tensor in interpreter.get_tensor_details()}
    dtypes = {index: np.dtype(tensor["dtype"]).name for index, tensor in details.items()}
    ops = interpreter._get_ops_details()
    computed = {int(index) for op in ops for index in op["outputs"]}
    computed |= {port["index"] for port in interpreter.get_input_details()}
    for op in ops:
        if op["op_name"] == "DEQUANTIZE" and int(op["inputs"][0]) not in computed:
            dtypes[int(op["outputs"][0])] = RESTORED
    return {
        details[int(op["outputs"][0])]["name"]: FileOp(
            op["op_name"],
            tuple(dtypes[int(index)] for index in op["inputs"] if index >= 0),
            dtypes[int(op["outputs"][0])],
        )
        for op in ops
        if len(op["outputs"])
    }


def find_contradiction(planned: Mapping[str, EffectiveOp], given: bytes, converted: bytes) -> str:
    """Return how the types of tensors contradict a plan in words; "" if the plan holds."""
    before, after = list_file_ops(given), list_file_ops(converted)
    for name, op in planned.items():
        if name not in before or before[name].writes != "float32":
            continue
        if name not in after or after[name].kind != before[name].kind:
            return f"{op.type} {name!r} is missing"
        ran, label = after[name], f"{op.type} {name!r}, planned in {op.config_text},"
        if op.approach in (Approach.DYNAMIC, Approach.WEIGHT_ONLY):
            # Rows of a table of GATHER keep the type of the table.
            writes = "int8" if ran.kind == "GATHER" else "float32"
            if ran.writes != writes or not {"int8", RESTORED} & set(ran.reads):
                return f"{label} reads {', '.join(ran.reads)}"
        elif op.precision is Precision.INT8:
            if ran.writes != "int8" or "float32" in ran.reads:
                return f"{label} reads {', '.join(ran.reads)} and writes {ran.writes}"
        elif ran.writes != "float32" or ran.reads != before[name].reads:
            return f"{label} reads {', '.join(ran.reads)} and writes {ran.writes}"
    return ""
