"""Decisions, documents of commands, messages and pages are those of the golden files.

The files freeze behaviour while the code behind is arranged anew; where behaviour is meant to
change, they are written again, and the diff is part of the change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import dense_runs
import numpy as np
import pytest
from command_here import run_main
from documents import decisions
from golden_nets import NETS
from masking import headings_of_page, masked, masked_text
from mistakes import test_mistakes_in_python as in_python
from mistakes import test_mistakes_on_the_command_line as on_the_command_line

from neural_mp.adaptors.openvino.graph import integer_weights
from neural_mp.core import hardware
from neural_mp.core.hardware import Hardware
from neural_mp.errors import NeuralMPError


@pytest.fixture(autouse=True, scope="module")
def _small_cpu() -> Iterator[None]:
    """Let the tool see a CPU with AVX2, whatever CPU runs the test."""
    cpu = Hardware("a CPU with AVX2", frozenset({"avx2"}), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "_detect_machine", lambda: cpu)
        # OpenVINO's kernels for weights as stored are probed, and AVX2 has none.
        patch.setattr(integer_weights, "_probe_working_cases", frozenset)
        yield


right, workplace = in_python.right, on_the_command_line.workplace
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]


@pytest.mark.parametrize(("framework", "net"), NETS, ids=lambda value: value)
def test_capabilities_and_fastest_plans_stay(agree, framework, net):
    agree(f"{framework}_{net}", decisions(framework, net))


def test_messages_of_mistakes_in_python_stay(agree, right, monkeypatch):
    folder, things = right
    monkeypatch.chdir(folder)
    messages = {}
    for mistake in in_python.MISTAKES:
        with pytest.raises(NeuralMPError) as caught:
            mistake.act(things)
        messages[mistake.name] = f"{type(caught.value).__name__}: {masked_text(str(caught.value))}"
    agree("mistakes_in_python", messages)


def test_messages_of_mistakes_on_the_command_line_stay(agree, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    messages = {}
    for mistake in on_the_command_line.MISTAKES:
        _, _, errors = run_main(*mistake.command)
        messages[" ".join(mistake.command)] = masked_text(errors.strip())
    agree("mistakes_on_the_command_line", messages)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    """A folder with a dense net, its data, a tuning file and the result in `tuned`."""
    folder = dense_runs.write_workplace(tmp_path_factory.mktemp("golden"))
    np.save(folder / "inputs.npy", np.load(folder / "test.npz")["inputs"][:64])
    return folder


#: Command → arguments; each with `--json`, in this order.
COMMANDS = {
    "tune": ("conf.yaml", "--output", "tuned"),
    "inspect": ("net.onnx",),
    "inspect a result": ("tuned",),
    "explain": ("net.onnx", "first"),
    "convert": ("net.onnx", "--plan", "tuned/plan.yaml", "--output", "replayed"),
    "audit": ("tuned", "--all"),
    "benchmark": ("net.onnx", "tuned"),
    "compare": ("net.onnx", "tuned", "--data", "inputs.npy"),
    "sensitivity": ("net.onnx", "--data", "inputs.npy"),
    "report": ("neural_mp_workspace",),
}


def test_documents_of_commands_and_the_page_stay(agree, tuned, monkeypatch):
    monkeypatch.chdir(tuned)
    documents = {}
    for title, arguments in COMMANDS.items():
        code, output, errors = run_main(title.partition(" ")[0], *arguments, "--json")
        assert code in (0, 1), errors
        documents[title] = masked(json.loads(output))
    agree("documents_of_commands", documents)
    code, output, errors = run_main("report", "neural_mp_workspace")
    assert code == 0, errors
    page = Path(output.split("page saved to ")[1].strip()).read_text(encoding="utf-8")
    agree("page", headings_of_page(page))
