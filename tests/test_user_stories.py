"""Users' stories from a model to a saved result, whose figures a loop of their own confirms.

Further stories have tests of their own: a search that SIGTERM ends and `--resume` continues
(`api/test_cli_codes.py`), images and masks in folders (`data/test_image_masks.py`), advice for
training (`training/`), scripts of Intel Neural Compressor (`compat/`), and the pages of
`docs/tasks/` (`test_docs.py`).
"""

import json

import numpy as np
import pytest
import torch
import yaml
from command_here import run_main
from sklearn.metrics import accuracy_score, roc_auc_score

import neural_mp
from neural_mp import MixedPrecision, convert_with_plan

pytestmark = pytest.mark.slow


def count_right(model, split, size=100):
    """Return the accuracy of a model by a loop over batches."""
    predicted = [
        np.asarray(model(split.images[start : start + size])).argmax(-1)
        for start in range(0, len(split), size)
    ]
    return accuracy_score(split.labels, np.concatenate(predicted))


def compute_metrics(eval_pred):
    """Return what a `Trainer` of transformers takes."""
    logits, labels = eval_pred
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


@pytest.fixture
def tuned(net, digits):
    """A tuned PyTorch net, judged by a metric that returns a dict."""
    converter = MixedPrecision(model=net, metric=compute_metrics, objective="modelsize")
    converter.precisions, converter.runtime = "int8", "source"
    converter.eval_dataloader, converter.calib_dataloader = digits[1].loader(), digits[0].loader()
    return converter()


def test_a_module_with_the_metric_of_a_trainer(tuned, net, digits, tmp_path):
    tuned.save(tmp_path / "tuned")
    report = tuned.report
    with torch.no_grad():
        baseline = count_right(lambda x: net(torch.from_numpy(x)), digits[1])
    assert tuned.met
    assert report.baseline_accuracy == pytest.approx(baseline)
    assert report.accuracy == pytest.approx(count_right(tuned, digits[1]))
    assert report.accuracy == pytest.approx(
        count_right(neural_mp.load(tmp_path / "tuned"), digits[1])
    )
    assert report.accuracy >= 0.99 * baseline
    assert report.op_counts["conv2d"]["int8"]


def test_a_plan_that_is_edited_by_hand(tuned, net, digits, tmp_path):
    tuned.save_plan(tmp_path / "plan.yaml")
    document = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    edited = next(op for op, config in tuned.plan.items() if config.precision == "int8")
    document["ops"][edited] = "fp32"
    (tmp_path / "edited.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    replayed = convert_with_plan(net, tmp_path / "edited.yaml")
    others = [op for op in tuned.plan if op != edited and tuned.plan[op].precision == "int8"]
    assert replayed.plan[edited].precision == "fp32"
    assert others
    assert all(replayed.plan[op].precision == "int8" for op in others)
    assert replayed.audit().holds
    assert count_right(replayed, digits[1]) >= 0.99 * tuned.report.baseline_accuracy


def test_a_file_on_the_command_line(net, digits, tmp_path):
    sample = torch.from_numpy(digits[1].images[:2])
    batch = {0: torch.export.Dim("batch")}
    torch.onnx.export(net, (sample,), tmp_path / "net.onnx", dynamic_shapes=(batch,), verbose=False)
    np.savez(tmp_path / "digits.npz", inputs=digits[1].images, labels=digits[1].labels)
    command = "tune net.onnx --data digits.npz --metric accuracy --output tuned --json"
    code, out, err = run_main(*command.split(), "--objective", "modelsize")
    assert code == 0, err
    report = json.loads(out)["report"]
    assert report["accuracy"] == pytest.approx(count_right(neural_mp.load("tuned"), digits[1]))
    assert report["size"] < report["baseline_size"]


def test_a_keras_model_on_a_table(tmp_path):
    import keras
    from sklearn.datasets import load_breast_cancer
    from sklearn.preprocessing import StandardScaler

    table = load_breast_cancer(as_frame=True)
    inputs = StandardScaler().fit_transform(table.data).astype(np.float32)
    labels = table.target.to_numpy()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((30,)),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(64, "relu"),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    model.compile("adam", "binary_crossentropy")
    model.fit(inputs[:400], labels[:400], epochs=4, verbose=0)
    converter = MixedPrecision(model=model, metric="AUC", objective="modelsize")
    converter.precisions, converter.runtime = "int8", "source"
    converter.eval_dataloader = [(inputs[400:], labels[400:])]
    converter.calib_dataloader = [inputs[:400]]
    result = converter()
    result.save(tmp_path / "tuned")
    loaded = neural_mp.load(tmp_path / "tuned")
    score = roc_auc_score(labels[400:], np.asarray(loaded(inputs[400:])).ravel())
    assert result.met
    assert result.report.accuracy == pytest.approx(score, abs=2e-3)
    assert result.report.op_counts["MatMul"]["int8"]
