"""Records of what a loop computes, iteration by iteration, to be read behind the loop.

The runtime fetches nothing from within a loop. So a list goes through the loop as one more of its
variables, and every iteration puts a record at its end.
"""

from __future__ import annotations

import tensorflow as tf

from neural_mp.adaptors.tensorflow.control_flow import ENTERS, frames
from neural_mp.adaptors.tensorflow.tensor_graph import TensorGraph, node_of


class LoopRecords:
    """Puts lists into the loops of a graph.

    Args:
        imported: graph as TensorFlow took it in, to which ops are added.
        graph: nodes of the same graph.
    """

    def __init__(self, imported: tf.Graph, graph: TensorGraph) -> None:
        self._imported = imported
        self._loops = frames(graph)
        self._conditions: dict[str, str] = {}
        self._around: dict[str, str] = {}
        self._parallel: dict[str, int] = {}
        for name, loop in self._loops.items():
            node = graph.nodes[name]
            if node.op == "LoopCond":
                self._conditions[loop] = name
            elif node.op in ENTERS:
                self._around[loop] = self._loops.get(node_of(node.input[0]), "")
                self._parallel[loop] = node.attr["parallel_iterations"].i

    def collected(self, tensor: str, record: tf.Tensor) -> tf.Tensor:
        """The records of all iterations, one behind the other, outside of all loops.

        Args:
            tensor: name of the tensor in a loop that the record is of.
            record: vector of float32, computed in the same loop.
        """
        ops = tf.raw_ops
        nest = self._nest(self._loops[node_of(tensor)])
        taken = ops.EmptyTensorList(
            element_shape=tf.constant(-1),
            max_num_elements=tf.constant(-1),
            element_dtype=tf.float32,
        )
        variables = []
        for loop in nest:
            entered = ops.Enter(
                data=taken, frame_name=loop, parallel_iterations=self._parallel[loop] or 10
            )
            merged = ops.Merge(inputs=[entered, entered]).output
            condition = self._imported.get_tensor_by_name(f"{self._conditions[loop]}:0")
            left, stays = ops.Switch(data=merged, pred=condition)
            variables.append((merged, left))
            taken = ops.Identity(input=stays)
        taken = ops.TensorListPushBack(input_handle=taken, tensor=record)
        for merged, left in reversed(variables):
            merged.op._update_input(1, ops.NextIteration(data=taken))
            taken = ops.Exit(data=left)
        return ops.TensorListConcatV2(
            input_handle=taken,
            element_shape=tf.constant([-1]),
            leading_dims=tf.constant([], tf.int64),
            element_dtype=tf.float32,
        ).tensor

    def _nest(self, loop: str) -> list[str]:
        """A loop with those around it, the outermost first."""
        found = []
        while loop:
            found.append(loop)
            loop = self._around[loop]
        return found[::-1]
