"""What scripts take from the inside of their package, as far as it is of use here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.compat.inc.import_aliases import looked_up

_COCO = (
    "person bicycle car motorcycle airplane bus train truck boat traffic_light fire_hydrant - "
    "stop_sign parking_meter bench bird cat dog horse sheep cow elephant bear zebra giraffe - "
    "backpack umbrella - - handbag tie suitcase frisbee skis snowboard sports_ball kite "
    "baseball_bat baseball_glove skateboard surfboard tennis_racket bottle - wine_glass cup fork "
    "knife spoon bowl banana apple sandwich orange broccoli carrot hot_dog pizza donut cake chair "
    "couch potted_plant bed - dining_table - - toilet - tv laptop mouse remote keyboard cell_phone "
    "microwave oven toaster sink refrigerator - book clock vase scissors teddy_bear hair_drier "
    "toothbrush"
)
#: Id → name of the 80 categories of COCO (annotations of 2017; ten ids of the 90 are not used).
category_map: Mapping[int, str] = {
    number: name.replace("_", " ")
    for number, name in enumerate(_COCO.split(), start=1)
    if name != "-"
}


class Performance:
    """A stopwatch: `start`, `end`, and `result_list` with the seconds in between."""

    def __init__(self) -> None:
        self._taken: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """Begin."""
        self._started = time.perf_counter()

    def end(self) -> None:
        """Note what it took."""
        self._taken.append(time.perf_counter() - self._started)

    def result_list(self) -> list[float]:
        """The seconds of every time."""
        return self._taken


def is_ckpt_format(model_path: str | Path) -> bool:
    """Whether a folder holds one checkpoint of TensorFlow 1."""
    endings = [file.suffix for file in Path(model_path).iterdir()]
    return endings.count(".meta") == 1 and endings.count(".index") == 1


def is_saved_model_format(model_path: str | Path) -> bool:
    """Whether a folder holds a SavedModel."""
    return any((Path(model_path) / f"saved_model.{ending}").is_file() for ending in ("pb", "pbtxt"))


def strip_unused_nodes(
    graph_def: object, input_node_names: Iterable[str], output_node_names: Sequence[str]
) -> Any:
    """The part of a TensorFlow graph that its outputs need."""
    import tensorflow as tf

    return tf.compat.v1.graph_util.extract_sub_graph(graph_def, list(output_node_names))


def iterator_sess_run(
    sess: Any,
    iter_op: object,
    feed_dict: Mapping[Any, Any],
    output_tensor: object,
    iteration: int = -1,
    measurer: Any = None,
) -> Any:
    """Run a TensorFlow graph that reads its data itself.

    Args:
        sess: a session of TensorFlow 1.
        iter_op: what makes the iterator.
        feed_dict: what that is fed.
        output_tensor: what is fetched.
        iteration: how often; -1 until the data end.
        measurer: told of the start and the end of every run.

    Returns:
        The results of all runs, joined along the first axis.
    """
    import tensorflow as tf

    sess.run(iter_op, feed_dict)
    found: list[Any] = []
    while len(found) != iteration:
        try:
            if measurer is not None:
                measurer.start()
            found.append(sess.run(output_tensor))
            if measurer is not None:
                measurer.end()
        except tf.errors.OutOfRangeError:
            break
    if found and isinstance(found[0], tuple | list):
        return [np.concatenate(parts) for parts in zip(*found, strict=True)]
    return np.concatenate(found) if found else found


def get_torch_version() -> Any:
    """The version of torch, as `packaging` has it, which scripts compare it with."""
    import torch
    from packaging.version import Version

    return Version(str(torch.__version__))


def get_example_inputs(model: object, dataloader: Any) -> Any:
    """The inputs of the first batch; None without data."""
    if dataloader is None:
        return None
    batch = next(iter(dataloader))
    inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    if isinstance(inputs, Mapping):
        return {key: value for key, value in inputs.items() if key != "label"}
    return tuple(inputs) if isinstance(inputs, list) else inputs


def __getattr__(name: str) -> Any:
    return looked_up(__name__, name, globals())
