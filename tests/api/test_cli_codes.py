"""The exit codes of the command line, and what stands beside them on standard error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata

import numpy as np
import onnx
import pytest
from nets import deep_net
from onnx_nets import convolutions
from typer.testing import CliRunner

from neural_mp.cli import app as application
from neural_mp.cli.app import app

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

COMMANDS = (
    "tune",
    "inspect",
    "explain",
    "convert",
    "benchmark",
    "advise",
    "hardware",
    "kernels",
    "compare",
    "sensitivity",
    "audit",
)
INTERRUPTS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


#: Code of a user's own: what each of its pieces does is said by the file `does`.
THEIRS = """
import os, signal, time
from pathlib import Path
import numpy as np
from sklearn.metrics import accuracy_score

def does(what):
    return Path("does").read_text() == what

class Digits:
    def __init__(self, split):
        data = dict(np.load(f"{split}.npz"))
        self.images, self.labels = data["inputs"], data["labels"]
    def __len__(self):
        return len(self.labels)
    def __getitem__(self, index):
        if does("data raises") and index > 100:
            raise OSError("the disk is gone")
        return self.images[index], self.labels[index]

class Right:
    higher_is_better = True
    passes = 0
    def reset(self):
        self.right = self.all = 0
        Right.passes += 1
    def update(self, preds, labels):
        if does("metric raises"):
            raise ZeroDivisionError("no such luck")
        if does("metric misuses a library"):
            accuracy_score(labels, preds)
        for name in ("SIGINT", "SIGTERM"):
            if does(f"{name} in pass {Right.passes}"):
                signal.raise_signal(signal.Signals[name])
        if does("waits"):
            print("waiting", flush=True)
            time.sleep(60)
        print("a line of the user's own")
        self.right += int((preds.argmax(1) == labels).sum())
        self.all += len(labels)
    def result(self):
        return self.right / self.all

def broken_model():
    raise LookupError("no weights")
"""
CONF = """
model: {name: net.pt2, runtime: source}
mixed_precision: {precisions: int8}
quantization:
  calibration:
    sampling_size: 300
    dataloader: {batch_size: 50, dataset: {"theirs:Digits": {split: train}}}
evaluation:
  accuracy:
    metric: {"theirs:Right": {}}
    dataloader: {batch_size: 100, dataset: {"theirs:Digits": {split: test}}}
"""


@pytest.fixture
def workplace(tmp_path, exported, digits, monkeypatch):
    """A folder with data, a model, code of a user's own and a tuning file."""
    for name, split in zip(("train", "test"), digits, strict=True):
        np.savez(tmp_path / f"{name}.npz", inputs=split.images, labels=split.labels)
    (tmp_path / "net.pt2").write_bytes(exported)
    (tmp_path / "theirs.py").write_text(THEIRS)
    (tmp_path / "conf.yaml").write_text(CONF)
    (tmp_path / "does").write_text("nothing")
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command; its exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["neural-mp", *arguments])
        with pytest.raises(SystemExit) as ended:
            application.main()
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.mark.parametrize(
    ("what", "raised", "statement"),
    [
        ("metric raises", "ZeroDivisionError: no such luck", "raise ZeroDivisionError("),
        ("metric misuses a library", "ValueError: ", "accuracy_score("),
        ("data raises", "OSError: the disk is gone", "raise OSError("),
    ],
)
def test_an_exception_of_the_users_own_is_theirs_and_3(run, workplace, what, raised, statement):
    (workplace / "does").write_text(what)
    code, _, err = run("tune", "conf.yaml")
    assert code == 3
    assert raised in err
    first, *_ = [line for line in err.splitlines() if line.startswith('  File "')]
    assert "theirs.py" in first  # not through what of ours it came there
    last = err.splitlines()[-1]
    lines = [line.strip() for line in THEIRS.splitlines()]
    number = next(n for n, line in enumerate(lines, 1) if line.startswith(statement))
    assert f"theirs.py, line {number})" in last
    assert last.endswith("not from neural-mp")


def test_a_model_of_the_users_own_that_raises_is_theirs(run, workplace):
    code, _, err = run("inspect", "theirs:broken_model")
    assert code == 3
    assert "LookupError: no weights" in err


def test_a_mistake_is_2_and_verbose_shows_where_it_was_found(run, workplace):
    code, _, err = run("inspect", "nothing.pt2")
    assert (code, len(err.splitlines())) == (2, 1)
    code, _, err = run("inspect", "nothing.pt2", "-v")
    assert code == 2
    assert "Traceback" in err


def test_a_wrong_option_is_2(run):
    assert run("tune", "conf.yaml", "--outptu", "x")[0] == 2


def test_a_fault_of_ours_is_neither_a_mistake_nor_a_missed_target(run, monkeypatch):
    def broken(*_, **__):
        raise IndexError("off by one")

    monkeypatch.setattr("neural_mp.core.hardware.detect", broken)
    module = sys.modules["neural_mp.core.hardware"]
    monkeypatch.setattr(broken, "__code__", broken.__code__.replace(co_filename=module.__file__))
    code, _, err = run("hardware")
    assert code == 4
    assert "IndexError: off by one" in err
    assert "internal error of neural-mp" in err


@pytest.fixture
def onnx_workplace(workplace):
    """The model in ONNX: a process of its own would import PyTorch for seconds."""
    onnx.save(convolutions(deep_net()), workplace / "net.onnx")
    conf = workplace / "conf.yaml"
    conf.write_text(conf.read_text().replace("net.pt2", "net.onnx"))
    return workplace


@pytest.fixture
def started(onnx_workplace, heeds_ctrl_c):
    """Function: options of `tune` → the process."""

    def start(*options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "neural_mp.cli.app", "tune", "conf.yaml", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=onnx_workplace,
        )

    return start


@pytest.mark.parametrize(("does", "code"), [("SIGINT in pass 3", 130), ("SIGTERM in pass 3", 143)])
def test_a_search_that_is_interrupted_shows_and_saves_its_result(
    started, onnx_workplace, does, code
):
    (onnx_workplace / "does").write_text(does)
    process = started("--output", "tuned")
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert "the search was interrupted" in out
    assert "saved to tuned; finished trials are kept" in err.splitlines()[-1]
    assert (onnx_workplace / "tuned" / "neural_mp.json").is_file()


@INTERRUPTS
def test_an_interrupt_while_the_users_code_waits(started, onnx_workplace, number):
    (onnx_workplace / "does").write_text("waits")
    process = started()
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    process.send_signal(number)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert "finished trials are kept; continue with --resume" in err


def test_a_run_that_sigterm_ended_is_resumed_with_its_trials(started, onnx_workplace):
    """The trials before the signal are neither lost nor evaluated again."""
    tuning = "tuning: {strategy: exhaustive, exit_policy: {max_trials: 3}}\n"
    (onnx_workplace / "conf.yaml").write_text((onnx_workplace / "conf.yaml").read_text() + tuning)
    (onnx_workplace / "does").write_text("SIGTERM in pass 4")
    process = started("--json")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 143, err
    (first,) = json.loads(out)["trials"]
    (onnx_workplace / "does").write_text("nothing")
    process = started("--resume", "--json")
    out, err = process.communicate(timeout=600)
    assert process.returncode in (0, 1, 5), err
    document = json.loads(out)
    assert [trial["number"] for trial in document["trials"]] == [0, 2, 3]
    assert document["trials"][0]["seconds"] == first["seconds"]
    assert document["report"]["evaluations"] == 2


@pytest.mark.usefixtures("heeds_ctrl_c")
@INTERRUPTS
def test_a_command_leaves_the_handler_of_an_interrupt_as_it_was(run, number):
    usual = signal.getsignal(number)
    assert run("hardware")[0] == 0
    assert signal.getsignal(number) is usual


#: Sends a signal where a module is imported, or where Python ends.
SENT = """
import atexit, os, signal, sys

class Sends:
    def find_spec(self, name, path=None, target=None):
        if name == place:
            os.kill(os.getpid(), number)

place, number = sys.argv.pop(), int(sys.argv.pop())
if place == "end":
    atexit.register(os.kill, os.getpid(), number)
sys.meta_path.insert(0, Sends())
from neural_mp.cli.entry_point import main
main()
"""


@pytest.mark.usefixtures("heeds_ctrl_c")
@INTERRUPTS
@pytest.mark.parametrize("place", ["neural_mp.cli.app", "numpy", "typer", "end"])
def test_an_interrupt_at_the_start_and_at_the_end_is_one_line(place, number):
    done = subprocess.run(
        [sys.executable, "-c", SENT, "hardware", str(int(number)), place],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 128 + number
    assert done.stderr.startswith("interrupted; nothing was saved\n")
    assert len(done.stderr.splitlines()) == 1


@INTERRUPTS
def test_an_ignored_interrupt_stays_ignored(number):
    ignoring = SENT.replace("\nif place", "\nsignal.signal(number, signal.SIG_IGN)\nif place")
    done = subprocess.run(
        [sys.executable, "-c", ignoring, "hardware", str(int(number)), "numpy"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_forked_child_of_a_command_ends_by_sigterm_in_silence():
    """Data loaders and pools end their children by this signal, and join them."""
    forking = """
import os, signal, time
from neural_mp.cli.output import Output

with Output():
    child = os.fork()
    if not child:
        time.sleep(60)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(ended)
"""
    done = subprocess.run([sys.executable, "-c", forking], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{-signal.SIGTERM}\n", "")


def test_a_closed_pipe_is_not_a_missed_target():
    command = [sys.executable, "-m", "neural_mp.cli.app", "hardware"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_help_has_an_example_and_the_exit_codes(command, flag):
    text = " ".join(CliRunner().invoke(app, [command, flag]).output.split())
    assert f"Example: neural-mp {command}" in text
    for meaning in (
        "0 done",
        "1 the accuracy target",
        "2 invalid input",
        "3 your own code",
        "130 ",
        "143 interrupted by SIGTERM",
    ):
        assert meaning in text
    for option in ("--quiet", "-q", "--verbose", "-v", "--json"):
        assert option in text


def test_the_version_and_completion_are_there():
    assert (
        CliRunner().invoke(app, ["--version"]).output
        == f"neural-mp {metadata.version('neural-mp')}\n"
    )
    assert "--install-completion" in CliRunner().invoke(app, ["-h"]).output
