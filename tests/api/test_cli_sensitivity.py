"""`neural-mp sensitivity`, as a user types it."""

import csv
import io
import json

import numpy as np
import pytest
from dense_runs import write_workplace

from neural_mp import MixedPrecision


@pytest.fixture
def data(workplace, digits):
    np.save("images.npy", digits[0].images[:64])
    return "images.npy"


@pytest.mark.slow
def test_every_decision_is_in_the_table_and_in_the_json(run, data):
    code, out, _ = run("sensitivity", "net.pt2", "--data", data, "--precision", "int8", "--json")
    assert code == 0
    rows = json.loads(out)["decisions"]
    assert {"stem", "block1.conv1", "head"} <= {op for row in rows for op in row["ops"]}
    assert all(row["noise"] > 0 and row["output_noise"] >= 0 for row in rows)
    shown = run("sensitivity", "net.pt2", "--data", data, "--precision", "int8")[1]
    assert all(row["name"] in shown for row in rows)


@pytest.mark.slow
def test_csv_is_all_there_is_on_stdout(run, data):
    _, out, _ = run("sensitivity", "net.pt2", "--data", data, "--most", "0", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) > 3
    assert all(row["output_noise"] == "" for row in rows)


@pytest.mark.slow
def test_a_saved_result_is_asked_what_its_run_measured(run, workplace, net, digits, accuracy):
    result = MixedPrecision(
        model=net, precisions="int8", metric=accuracy, eval_dataloader=digits[1].loader()
    )()
    result.save("tuned")
    code, out, _ = run("sensitivity", "tuned", "--json")
    assert code == 0
    assert json.loads(out)["decisions"] == json.loads(json.dumps(result.sensitivity().to_dict()))


@pytest.mark.slow
def test_a_csv_table_serves_as_it_does_for_tune(run, tmp_path, monkeypatch):
    """Features, and the label in the last column."""
    monkeypatch.chdir(write_workplace(tmp_path))
    with np.load("test.npz") as data:
        np.save("x.npy", data["inputs"])
        np.savetxt(
            "x.csv",
            np.column_stack([data["inputs"], data["labels"]]),
            delimiter=",",
            header=",".join([*map("f{}".format, range(16)), "label"]),
            comments="",
        )
    noises = []
    for file in ("x.npy", "x.csv"):
        code, out, err = run("sensitivity", "net.onnx", "--data", file, "--most", "0", "--json")
        assert code == 0, err
        noises.append([row["noise"] for row in json.loads(out)["decisions"]])
        assert run("compare", "net.onnx", "net.onnx", "--data", file)[0] == 0
    assert len(noises[0]) == 2
    np.testing.assert_allclose(noises[1], noises[0], rtol=1e-4)


def test_without_data_it_says_that_random_inputs_say_little(run, workplace):
    _, _, err = run("sensitivity", "net.pt2", "--most", "0")
    assert "give --data" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["net.pt2", "--data", "nothing.npy"], "there is no file 'nothing.npy'"),
        (["nothing.pt2"], "model file 'nothing.pt2' does not exist"),
        (
            ["net.pt2", "--data", "images.npy", "--precision", "int7"],
            "did you mean 'int8' or 'int4' or 'int3'?",
        ),
        (["net.pt2", "--json", "--csv"], "exclude each other"),
    ],
)
def test_bad_input_is_one_clear_error(run, data, arguments, said):
    code, _, err = run("sensitivity", *arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
