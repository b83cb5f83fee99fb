"""What commands print: JSON alone, tables that fit their reader, and a bar that moves."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from neural_mp.adaptors.tensorflow.log_suppression import suppress_startup_logs
from neural_mp.core.plan import PrecisionPlan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

TESTS = Path(__file__).parent.parent
#: What makes a terminal write in a colour; others make it write bold, dim or in italics.
COLOUR = r"\x1b\[(?:\d+;)*[39]\dm"
NET = ("nets:small_net", "--input-shape", "2,1,8,8")


def command(*arguments: str, **environment: str):
    """A process of its own that runs the command, and its environment."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ["PYTHONPATH"]])
    }
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        env.pop(name, None)
    env |= {"TERM": "xterm-256color"} | environment
    return [sys.executable, "-m", "neural_mp.cli.app", *arguments], env


def terminal(columns: int) -> tuple[int, int]:
    """Both ends of a terminal."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return mine, theirs


def all_of(end: int, into: list[bytes]) -> None:
    while True:
        try:
            part = os.read(end, 1 << 16)
        except OSError:  # so Linux says that a terminal is closed
            part = b""
        if not part:
            return
        into.append(part)


def on_a_terminal(*arguments: str, columns: int = 80, **environment: str) -> tuple[str, str]:
    """What the command shows on a terminal: on standard output, and on standard error."""
    line, env = command(*arguments, **environment)
    ends = [terminal(columns) for _ in range(2)]
    parts: list[list[bytes]] = [[], []]
    process = subprocess.Popen(line, stdout=ends[0][1], stderr=ends[1][1], env=env)
    readers = [
        threading.Thread(target=all_of, args=(mine, into))
        for (mine, _), into in zip(ends, parts, strict=True)
    ]
    for (_, theirs), reader in zip(ends, readers, strict=True):
        os.close(theirs)
        reader.start()
    assert process.wait(timeout=600) == 0
    for (mine, _), reader in zip(ends, readers, strict=True):
        reader.join()
        os.close(mine)
    return b"".join(parts[0]).decode(), b"".join(parts[1]).decode()


def names_in(run, *arguments: str) -> list[str]:
    return [op["name"] for op in json.loads(run("inspect", *arguments, "--json")[1])]


def rows(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("│")]


class TestJson:
    """Nothing but one document on standard output, whatever else is printed."""

    def test_tune_gives_the_report_the_trials_and_the_plan(self, run, workplace):
        (workplace / "chatty.py").write_text(
            "from neural_mp.data.datasets import DATASETS\n"
            "def digits(path):\n"
            "    print('reading', path)\n"
            "    return DATASETS.build('numpy', {'path': path})\n"
        )
        conf = (workplace / "conf.yaml").read_text().replace("numpy: {", '"chatty:digits": {')
        (workplace / "conf.yaml").write_text(conf)
        code, out, err = run("tune", "conf.yaml", "-o", "tuned", "--json")
        assert code == 0
        document = json.loads(out)
        assert "reading test.npz" in err
        assert document["met"]
        assert document["framework"] == "pytorch"
        assert document["saved_to"] == "tuned"
        report = document["report"]
        assert report["metric"] == "Accuracy"
        assert report["accuracy"] >= report["target"]
        assert 0 < report["size"] < report["baseline_size"]
        assert 0 < report["footprint"] < report["baseline_footprint"]
        assert [trial["outcome"] for trial in document["trials"]].count("met") >= 1
        assert PrecisionPlan.from_dict(document["plan"]) == PrecisionPlan.load("tuned/plan.yaml")

    def test_convert_gives_the_report_and_the_plan(self, run, workplace, monkeypatch):
        monkeypatch.setenv("FORCE_BF16", "1")
        Path("plan.yaml").write_text("neural_mp_plan: 2\nops: {stem: bf16}\n")
        code, out, _ = run("convert", *NET, "--plan", "plan.yaml", "-o", "replayed", "--json")
        assert code == 0
        document = json.loads(out)
        assert document["met"] is None
        plan = PrecisionPlan.from_dict(document["plan"])
        assert (plan["stem"].precision, plan["head"].precision) == ("bf16", "fp32")
        assert document["report"]["op_counts"]["conv2d"]["bf16"] == 1

    def test_convert_measures_latency_with_inputs_of_the_given_shape(self, run, workplace):
        Path("plan.yaml").write_text("neural_mp_plan: 2\nops: {stem: fp32}\n")
        shape = ("--input-shape", "5,1,8,8")
        code, out, _ = run("convert", NET[0], *shape, "--plan", "plan.yaml", "-o", "five", "--json")
        assert code == 0
        assert json.loads(out)["report"]["batch_size"] == 5

    def test_benchmark_gives_a_row_for_every_model(self, run):
        code, out, _ = run("benchmark", NET[0], *NET, "--iterations", "3", "--json")
        assert code == 0
        first, second = json.loads(out)["models"]
        assert first["speed"] == 1
        assert second["speed_low"] <= second["speed"] <= second["speed_high"]
        assert first["samples_per_second"] == pytest.approx(2 / first["latency"])

    def test_explain_gives_the_decision_for_every_precision(self, run):
        document = json.loads(run("explain", NET[0], "head", *NET[1:], "--json")[1])
        assert document["op"] == "head"
        assert document["type"] == "linear"
        lists = {precision: entry["list"] for precision, entry in document["precisions"].items()}
        assert lists == {"int8": None, "bf16": "ALLOW", "fp16": "ALLOW"}
        assert document["precisions"]["int8"]["decision"] == "int8"

    def test_advise_gives_every_layer(self, run, workplace):
        keras = pytest.importorskip("keras")
        layers = [keras.Input((1, 8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        model.save("net.keras")
        arguments = ("advise", "conf.yaml", "--model", "net.keras", "--steps", "2")
        code, out, _ = run(*arguments, "-o", "advised.yaml", "--json")
        assert code == 0
        document = json.loads(out)
        assert document["precision"] == "bf16"
        assert [layer["class"] for layer in document["layers"]].count("Dense") == 1
        assert Path(document["saved_to"]).is_file()

    @pytest.mark.usefixtures("tuned_workplace")
    def test_inspect_of_a_summary_and_of_a_saved_result(self, run):
        document = json.loads(run("inspect", *NET, "--summary", "--json")[1])
        assert document["types"]["conv2d"]["int8"] == document["types"]["conv2d"]["ops"]
        assert document["ops"] == sum(by["ops"] for by in document["types"].values())
        saved = json.loads(run("inspect", "tuned", "--json")[1])
        assert saved["plan"] == PrecisionPlan.load("tuned/plan.yaml").to_dict()

    def test_a_mistake_is_the_only_document(self, run):
        code, out, err = run("inspect", "nothing.pt2", "--json")
        assert (code, list(json.loads(out))) == (2, ["error"])
        assert "nothing.pt2" in err


class TestPiped:
    def test_every_name_is_found_by_grep(self, run, tmp_path, monkeypatch):
        keras_nets = pytest.importorskip("keras_nets")
        keras_nets.keras.utils.clear_session(free_memory=False)
        keras_nets.small_net().save(tmp_path / "digits.keras")
        monkeypatch.setenv("COLUMNS", "80")
        model = str(tmp_path / "digits.keras")
        _, out, _ = run("inspect", model)
        names = names_in(run, model)
        assert any("conv2d_1" in name for name in names)
        for name in names:
            assert re.search(rf"(?<![\w/.]){re.escape(name)}(?![\w/.])", out), name
        assert "…" not in out

    def test_nothing_is_coloured_unless_it_is_asked_for(self, run, monkeypatch):
        assert "\x1b" not in "".join(map(str, run("hardware")))
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert "\x1b[32m" in run("hardware")[1]
        monkeypatch.setenv("NO_COLOR", "1")
        assert not re.search(COLOUR, run("hardware")[1])

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
    def test_an_encoding_that_lacks_characters_gets_the_nearest(self, encoding):
        line, env = command("hardware", PYTHONIOENCODING=encoding, PYTHONUTF8="0", LC_ALL="C")
        done = subprocess.run(line, env=env, capture_output=True, check=True)
        assert "natively" in done.stdout.decode(encoding)
        assert done.stderr == b""


class TestOnATerminal:
    def test_a_bar_moves_while_a_model_is_loaded_and_the_table_fits(self):
        out, err = on_a_terminal("inspect", *NET)
        frames = set(re.findall("([⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏])\x1b[^ ]* Loading nets:small_net", err))
        assert len(frames) > 4
        lines = re.sub(r"\x1b\[[\d;]*m", "", out).split("\r\n")
        assert max(map(len, lines)) <= 80
        shown = "\n".join(lines)
        for name in ("stem", "block1.conv1", "block2.shortcut.0", "head"):
            assert re.search(rf"│ {name} +│", shown), name
        assert "\x1b[2m" in out

    def test_without_colours_and_without_a_bar(self):
        out, err = on_a_terminal("hardware", "--quiet", NO_COLOR="1")
        assert "natively" in out
        assert not re.search(COLOUR, out)
        assert err == ""


class TestInspect:
    def test_ops_of_one_layer_share_a_row(self, run):
        _, grouped, _ = run("inspect", *NET)
        _, ungrouped, _ = run("inspect", *NET, "--all")
        names = names_in(run, *NET)
        assert len(rows(ungrouped)) == len(names)
        assert len(rows(grouped)) < 0.75 * len(names)
        together = next(row for row in rows(grouped) if "block1.conv1" in row)
        assert "block1.act" in together
        assert "--all" in grouped

    def test_ops_of_a_type(self, run):
        _, out, _ = run("inspect", *NET, "--type", "LINEAR", "--type", "mean")
        assert [row.split("│")[2].strip() for row in rows(out)] == ["mean", "linear"]

    def test_ops_that_a_pattern_fits(self, run):
        names = names_in(run, *NET, "--match", r"block1\..*", "--type", "conv2d")
        assert set(names) >= {"block1.conv1", "block1.conv2"}
        assert all(name.startswith("block1.") for name in names)

    def test_a_summary_counts_ops_and_reasons(self, run):
        _, out, _ = run("inspect", *NET, "--summary")
        assert "Supported precisions of" in out
        (convolutions,) = [row for row in rows(out) if row.startswith("│ conv2d ")]
        count = convolutions.split("│")[2].strip()
        assert convolutions.count(count) >= 2
        assert "no integer kernel" in out

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--type", "conv3d"), "did you mean 'conv2d'"),
            (("--match", "block("), "is not a regular expression"),
            (("--match", "hed"), "did you mean 'head'"),
        ],
    )
    def test_what_fits_nothing_is_a_mistake(self, run, arguments, said):
        code, _, err = run("inspect", *NET, *arguments)
        assert code == 2
        assert said in err


@pytest.mark.parametrize("level", [None, "3"])
def test_tensorflow_is_silent_in_python(level):
    pytest.importorskip("tensorflow")
    code = (
        "import neural_mp.adaptors.tensorflow\nimport tensorflow as tf\n"
        "print(float(tf.reduce_sum(tf.ones(3))))"
    )
    _, env = command()
    env.pop("TF_CPP_MIN_LOG_LEVEL", None)
    if level is not None:
        env["TF_CPP_MIN_LOG_LEVEL"] = level
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("3.0\n", "")


def test_a_level_that_is_set_stays(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    finders = list(sys.meta_path)
    suppress_startup_logs()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert sys.meta_path == finders
