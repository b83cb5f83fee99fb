"""Language models: GLUE and SQuAD in ONNX Runtime and TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from inc_data import records
from inc_data import text as texts

from inc_examples.case import ACCURACY_V2, PERFORMANCE, V1, V2, Case, Step, steps

WIDTH, TOKENS = 64, 384
#: Answer of the made-up questions.
_ANSWER = "dog"
_IDS, _MASK, _SEGMENTS = "input_ids", "input_mask", "segment_ids"


def _weights(answer: int, size: int) -> dict[str, np.ndarray]:
    """Return tables and matrices of a net that points at the word `answer`."""
    rng = np.random.default_rng(0)
    # Random ids of a benchmark reach 1000.
    table = rng.uniform(0, 0.1, (max(size, 1001), WIDTH))
    table[answer] = rng.uniform(0.9, 1.1, WIDTH)
    return {
        "words": table.astype(np.float32),
        "kinds": rng.uniform(0, 0.01, (2, WIDTH)).astype(np.float32),
        "w1": rng.uniform(0, 2 / WIDTH, (WIDTH, WIDTH)).astype(np.float32),
        "w2": rng.uniform(0, 20 / WIDTH, (WIDTH, 2)).astype(np.float32),
    }


def onnx_reader(
    path: Path, vocabulary: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    """Write a net on token ids: logits of classes for one output, else of starts and ends.

    Args:
        path: the file.
        vocabulary: the vocabulary.
        inputs: names of the ids, the mask and maybe the segments.
        outputs: one or two names.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    node = helper.make_node
    weights = _weights(vocabulary.index(_ANSWER), len(vocabulary))
    weights |= {"last": np.array([-1], np.int64), "b": np.zeros(2, np.float32)}
    nodes = [
        node("Gather", ["words", inputs[0]], ["embedded"], "embedding"),
        node("Cast", [inputs[1]], ["mask"], "mask_floats", to=TensorProto.FLOAT),
        node("Unsqueeze", ["mask", "last"], ["mask3"], "mask_column"),
    ]
    tensor = "embedded"
    if len(inputs) > 2:
        nodes.append(node("Gather", ["kinds", inputs[2]], ["kind"], "segment_embedding"))
        nodes.append(node("Add", ["embedded", "kind"], ["sum"], "sum"))
        tensor = "sum"
    nodes += [
        node("Mul", [tensor, "mask3"], ["masked"], "masking"),
        node("MatMul", ["masked", "w1"], ["a"], "dense1"),
        node("Relu", ["a"], ["h"], "relu"),
    ]
    if len(outputs) == 1:
        nodes += [
            node("ReduceMean", ["h"], ["pooled"], "pool", axes=[1], keepdims=0),
            node("Gemm", ["pooled", "w2", "b"], list(outputs), "classifier"),
        ]
        shape = ["batch", 2]
    else:
        nodes += [
            node("MatMul", ["h", "w2"], ["both"], "dense2"),
            node("Split", ["both"], ["first", "second"], "halves", axis=2),
            node("Squeeze", ["first", "last"], [outputs[0]], "starts"),
            node("Squeeze", ["second", "last"], [outputs[1]], "ends"),
        ]
        shape = ["batch", "length"]
    kind = TensorProto.INT64 if len(outputs) == 1 else TensorProto.INT32
    ids = [helper.make_tensor_value_info(name, kind, ["batch", "length"]) for name in inputs]
    graph = helper.make_graph(
        nodes,
        "reader",
        ids,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 13)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(path))


def frozen_reader(path: Path, answer: int) -> None:
    """Write a frozen graph that points at a word; for the ids of `inc_data.records`."""
    import tensorflow as tf

    weights = _weights(answer, 200)
    with tf.Graph().as_default() as graph:
        ids, mask, kinds = (
            tf.compat.v1.placeholder(tf.int32, (None, TOKENS), name)
            for name in (_IDS, _MASK, _SEGMENTS)
        )
        x = tf.gather(weights["words"], ids) + tf.gather(weights["kinds"], kinds)
        x = tf.reshape(x * tf.cast(mask, tf.float32)[..., None], (-1, WIDTH))
        x = tf.matmul(tf.nn.relu(tf.matmul(x, weights["w1"])), weights["w2"])
        logits = tf.reshape(x, (-1, TOKENS, 2))
        for index, name in enumerate(("start_logits", "end_logits")):
            tf.identity(logits[..., index], name)
    path.write_bytes(graph.as_graph_def().SerializeToString())


_LANGUAGE = "examples/onnxrt/language_translation"


def _sentences(folder: Path, kind: str) -> list[str]:
    """Write pairs of sentences and tokenizers into `glue/`; return the vocabulary."""
    (folder / "glue").mkdir()
    texts.sentences(folder / "glue")
    file = folder / "glue" / kind / "vocab.txt"
    if file.exists():
        return file.read_text().splitlines()
    return [*(str(number) for number in range(400)), _ANSWER]  # byte pairs


def sentence_classifier(folder: Path, kind: str) -> None:
    """Write pairs of sentences and tokenizers into `glue/`, and the net beside."""
    inputs = [_IDS, _MASK] if kind in ("distilbert", "roberta") else [_IDS, _MASK, _SEGMENTS]
    onnx_reader(folder / "net.onnx", _sentences(folder, kind), inputs, ["logits"])


def _glue(version: str, model: str, config: str, output: str = "int8.onnx") -> Case:
    """Return a classifier of pairs of sentences; `config`: file of version 1, folder of 2."""
    make = partial(sentence_classifier, kind=model)
    common: tuple[str, ...] = ("--model_path", "net.onnx")
    if version == V2:
        common += ("--data_path", "glue", "--model_name_or_path", f"glue/{model}")
        calls = steps((*common, "--model_type", model), ("--output_model", output), ACCURACY_V2)
        return Case(
            f"examples/onnxrt/nlp/{model}/quantization/{config}",
            make,
            calls,
            result=output,
            tag=V2,
        )
    return Case(
        f"{_LANGUAGE}/{model}/quantization/ptq",
        make,
        steps((*common, "--config", config), ("--output_model", output)),
        paths={"data_dir": "glue", "model_name_or_path": f"glue/{model}"},
        result=output,
    )


def _questions(folder: Path) -> list[str]:
    """Write questions into `squad/` and the vocabulary; return it."""
    (folder / "squad").mkdir()
    texts.questions(folder / "squad")
    (folder / "uncased_L-12_H-768_A-12").mkdir()
    vocabulary = (folder / "squad/vocab.txt").read_text()
    (folder / "uncased_L-12_H-768_A-12/vocab.txt").write_text(vocabulary)
    return vocabulary.splitlines()


def _squad(version: str, config: str) -> Case:
    def make(folder: Path) -> None:
        outputs = ["start_logits", "end_logits"]
        onnx_reader(folder / "net.onnx", _questions(folder), [_IDS, _MASK, _SEGMENTS], outputs)

    common: tuple[str, ...] = ("--model_path", "net.onnx", "--data_path", "squad")
    folder = f"examples/onnxrt/nlp/onnx_model_zoo/mobilebert/quantization/{config}"
    if version != V2:
        folder = f"{_LANGUAGE}/onnx_model_zoo/mobilebert/quantization/ptq"
        common = (*common, "--config", config)
    elif config == "ptq_static":
        common = (*common, "--quant_format", "QDQ")
    calls = steps(common, ("--save_path", "int8.onnx"), ACCURACY_V2)
    return Case(folder, make, calls, result="int8.onnx", tag=version)


#: Key of a tuning file → path that `question_records` writes.
QUESTION_PATHS = {
    "root": "squad/eval.tf_record",
    "label_file": "squad/dev-v1.1.json",
    "vocab_file": "words/vocab.txt",
}


def question_records(folder: Path) -> None:
    """Write questions as records of token ids, their vocabulary, and the net beside."""
    (folder / "squad").mkdir()
    records.of_tokens(folder / "squad")
    (folder / "words").mkdir()
    texts.questions(folder / "words")
    vocabulary = (folder / "words/vocab.txt").read_text().splitlines()
    frozen_reader(folder / "net.pb", vocabulary.index(_ANSWER))


def _tensorflow_squad() -> Case:
    common = ("--input_model=net.pb", "--config=bert.yaml")
    return Case(
        "examples/tensorflow/nlp/bert_large_squad_model_zoo/quantization/ptq",
        question_records,
        {
            "tune": Step((*common, "--tune", "--output_model=int8.pb")),
            "accuracy": Step((*common, "--benchmark", "--mode=accuracy"), (r"Accuracy is [\d.]+",)),
            "performance": Step((*common, "--benchmark", "--mode=performance"), PERFORMANCE),
        },
        script="tune_squad.py",
        paths=QUESTION_PATHS,
        result="int8.pb",
    )


CASES: tuple[Case, ...] = (
    _glue(V1, "bert", "bert_static.yaml"),
    _glue(V2, "distilbert", "ptq_static"),
    _squad(V1, "mobilebert_qdq.yaml"),
    _squad(V2, "ptq_static"),
    _tensorflow_squad(),
)
