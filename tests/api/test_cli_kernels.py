"""`neural-mp kernels`: logs of files, and of programs that it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from neural_mp.core import hardware
from neural_mp.core.precision import Precision

#: Whether oneDNN is told to do as on an older processor.
LIMITED = "ONEDNN_MAX_CPU_ISA" in os.environ
#: What a program prints that runs two kernels of oneDNN, if the variable is set.
PROGRAM = """
import os, sys
LINE = "onednn_verbose,v1,primitive,exec,cpu,convolution,{},undef,src:{}::f0,,,mb4_ic3,{}"
print("epoch 1")
print("loss 0.5", end="")
if os.environ.get("ONEDNN_VERBOSE") == "1":
    print(LINE.format("brg_conv_fwd:avx2", "f32", 0.75))
    print(LINE.format("jit:uni", "u8", 0.25), flush=True)
    print(LINE.format("jit:uni", "u8", 0.25)[:70])
print("of stderr", file=sys.stderr)
print("the end", sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""
FIT = """
import sys
import keras
import numpy as np

keras.mixed_precision.set_dtype_policy(sys.argv[1])
images = np.random.default_rng(0).random((320, 8, 8, 1), np.float32)
layers = [
    keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
    keras.layers.Flatten(),
    keras.layers.Dense(10),
    keras.layers.Activation("softmax", dtype="float32"),
]
net = keras.Sequential([keras.Input((8, 8, 1)), *layers])
net.compile("adam", "sparse_categorical_crossentropy")
net.fit(images, np.arange(320) % 10, batch_size=64, epochs=1)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return (sys.executable, "program.py")


def summed(path):
    """Calls and milliseconds of a log, by its lines alone."""
    lines = [
        line for line in Path(path).read_text(encoding="utf-8").splitlines() if ",exec,cpu," in line
    ]
    return len(lines), sum(float(line.split(",")[-1]) for line in lines)


class TestOfAProgram:
    def test_its_output_passes_and_the_table_follows(self, run, program):
        code, out, _ = run("kernels", "--", *program, "0", "--json", "--by")
        assert code == 0
        assert out.startswith("epoch 1\nloss 0.5the end ['0', '--json', '--by']\n")
        assert "_verbose" not in out
        assert "│ brg_conv_fwd:avx2 │     1 │     0.750 ms │  75.0% │" in out
        assert "│ all               │     2 │     1.000 ms │ 100.0% │" in out
        assert "1 unreadable line not counted" in out

    def test_its_exit_code_is_kept(self, run, program):
        code, out, err = run("kernels", "--", *program, "7")
        assert code == 7
        assert "jit:uni" in out
        assert "ended with exit code 7" in err

    def test_that_of_a_program_that_a_signal_ended_is_as_in_a_shell(self, run):
        code, _, err = run("kernels", "--", "sh", "-c", "kill -9 $$")
        assert code == 128 + signal.SIGKILL
        assert "before any kernel of oneDNN ran" in err

    def test_with_json_its_output_goes_to_standard_error(self, run, program):
        code, out, err = run("kernels", "--by", "precision", "--json", "--", *program, "3")
        assert code == 3
        report = json.loads(out)
        assert report["exit_code"] == 3
        assert report["milliseconds"] == 1
        assert report["malformed"] == 1
        rows = [(row["name"], row["share"]) for row in report["by"]["precision"]]
        assert rows == [("fp32", 0.75), ("int8", 0.25)]
        assert "the end" in err

    def test_its_log_is_kept_and_read_again(self, run, program):
        run("kernels", "--output", "kept.log", "--", *program, "0")
        report = json.loads(run("kernels", "kept.log", "--json")[1])
        assert (report["calls"], report["milliseconds"], report["malformed"]) == (2, 1, 1)

    def test_a_program_without_a_kernel_is_told_why(self, run, monkeypatch):
        monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
        code, out, err = run("kernels", "--", "echo", "hello")
        assert (code, out) == (2, "hello\n")
        assert "the program ran no oneDNN kernels" in err
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
        assert (
            "disabled by TF_ENABLE_ONEDNN_OPTS=0; set TF_ENABLE_ONEDNN_OPTS=1"
            in run("kernels", "--", "true")[2]
        )

    def test_it_is_given_the_environment_of_the_user(self, run, monkeypatch):
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
        _, out, _ = run("kernels", "--", "env")
        assert "ONEDNN_VERBOSE=1" in out
        assert "DNNL_VERBOSE=1" in out

    @pytest.mark.usefixtures("heeds_ctrl_c")
    @pytest.mark.parametrize(
        ("number", "send"), [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)]
    )
    def test_what_it_did_until_an_interrupt_is_shown(self, tmp_path, number, send):
        """Terminals send Ctrl-C to the program as well, others SIGTERM to the command alone."""
        waiting = PROGRAM.replace(
            "sys.exit(", "import time; sys.stdout.flush(); time.sleep(3600) or ("
        )
        (tmp_path / "waiting.py").write_text(waiting)
        command = [sys.executable, "-m", "neural_mp.cli.app", "kernels", "--"]
        process = subprocess.Popen(
            [*command, sys.executable, "waiting.py", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        for line in process.stdout:
            if "the end" in line:
                break
        send(process.pid, number)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 128 + number
        assert "│ jit:uni " in out
        assert "interrupted" in err

    def test_a_reader_that_has_seen_enough_ends_it(self):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "neural_mp.cli.app", "kernels", "--", "yes"]
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, timeout=600, check=False
        )
        os.close(writing)
        assert done.returncode == 128 + signal.SIGPIPE
        assert done.stderr == b""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no log is given"),
        (("nothing.log",), "'nothing.log' cannot be read"),
        (("empty.log",), "empty.log contains no kernel: no line is of oneDNN"),
        (("empty.log", "--by", "kernel"), "known are implementation"),
        (("empty.log", "--", "true"), "give one of them"),
        (("empty.log", "-o", "kept.log"), "--output requires a program"),
        (("--",), "a program must follow --"),
        (("--", "no_such_program"), "'no_such_program' cannot be run"),
        (("-o", "no/where.log", "--", "true"), "no/where.log cannot be written"),
    ],
)
def test_a_mistake_is_one_clear_error(run, arguments, said):
    Path("empty.log").write_text("epoch 1\n")
    code, out, err = run("kernels", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_standard_input_is_read_where_a_dash_stands(program):
    environment = os.environ | {"ONEDNN_VERBOSE": "1"}
    printed = subprocess.run([*program, "0"], env=environment, stdout=subprocess.PIPE, check=True)
    command = [sys.executable, "-m", "neural_mp.cli.app", "kernels", "-", "--json"]
    done = subprocess.run(command, input=printed.stdout, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["milliseconds"] == 1


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """In FP32 caught by hand, among progress bars; in BF16 kept by the command; what it printed."""
    pytest.importorskip("keras")
    folder = tmp_path_factory.mktemp("fits")
    (folder / "fit.py").write_text(FIT)
    environment = os.environ | {"ONEDNN_VERBOSE": "1", "KERAS_BACKEND": "tensorflow"}
    with (folder / "fp32.log").open("w") as file:
        command = [sys.executable, "fit.py", "float32"]
        subprocess.run(command, cwd=folder, env=environment, stdout=file, check=True)
    kernels = [sys.executable, "-m", "neural_mp.cli.app", "kernels", "-q", "-o", "bf16.log"]
    command = [*kernels, "--json", "--by", "precision", "--", sys.executable, "fit.py"]
    done = subprocess.run(
        [*command, "mixed_bfloat16"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    return folder / "fp32.log", folder / "bf16.log", json.loads(done.stdout)


@pytest.mark.slow
class TestOfAKerasFit:
    def test_its_table_has_all_that_its_log_has(self, run, logs):
        fp32, bf16, printed = logs
        report = json.loads(run("kernels", str(fp32), "--json")[1])
        for path, document in ((fp32, report), (bf16, printed)):
            calls, milliseconds = summed(path)
            assert document["malformed"] == 0
            assert document["calls"] == calls
            assert document["milliseconds"] == pytest.approx(milliseconds)
            (rows,) = document["by"].values()
            assert sum(row["calls"] for row in rows) == calls
            assert sum(row["share"] for row in rows) == pytest.approx(1)
        assert "1/5" in fp32.read_text(encoding="utf-8")

    def test_what_ran_in_bf16_is_seen_or_why_it_could_not(self, logs):
        names = [row["name"] for row in logs[2]["by"]["precision"]]
        notes = " ".join(logs[2]["notes"])
        if hardware.detect({}).support(Precision.BF16).native and not LIMITED:
            assert "bf16" in names
            assert notes == ""
        elif "AVX" in logs[2]["isa"]:
            assert "this CPU has no BF16" in notes

    def test_two_logs_show_which_kernels_changed(self, run, logs):
        if not any(row["name"] == "bf16" for row in logs[2]["by"]["precision"]):
            pytest.skip("this machine runs none in BF16")
        report = json.loads(run("kernels", str(logs[0]), str(logs[1]), "--json")[1])
        changed = {change["work"]: change for change in report["changed"]}
        forward = changed["convolution forward"]
        assert all(kernel.endswith(" fp32") for kernel in forward["before"])
        assert all(kernel.endswith(" bf16") for kernel in forward["after"])
        assert forward["calls_before"] == forward["calls_after"] == 5
        out = run("kernels", str(logs[0]), str(logs[1]))[1]
        assert "Changed kernels" in out
        assert forward["after"][0] in out
