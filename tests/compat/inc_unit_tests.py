"""Unit tests of Intel Neural Compressor 3.x for PyTorch, run with neural-mp in its place.

    python tests/compat/inc_unit_tests.py --repository FOLDER [--only test_rtn] [--out table.md]

The folder is a clone of the repository. Files run unchanged, each in a process of its own, with
every import of `neural_compressor` answered by this package, and with a decoder of random weights
of the same architecture (GPT-J, OPT) in place of every model of a hub. The tables list passed and
failed tests per file, and the last line of each failure. `test_pt2e_quant` needs `expecttest`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = "test"
FILES = (
    "common/test_common.py",
    "common/test_logger.py",
    "common/test_param.py",
    "common/test_utility.py",
    "torch/test_config.py",
    "torch/test_autotune.py",
    "torch/utils/test_auto_accelerator.py",
    "torch/utils/test_torch_utility.py",
    *(
        f"torch/quantization/test_{name}.py"
        for name in ("static_quant", "smooth_quant", "pt2e_quant", "mx_quant", "autoround_cpu")
    ),
    *(
        f"torch/quantization/weight_only/test_{name}.py"
        for name in ("rtn", "gptq", "awq", "teq", "hqq", "mixed_algos", "woq_utils", "load")
    ),
    "torch/quantization/weight_only/test_transformers.py",
)
_LONGEST = 900
#: Loaded by pytest in the folder of the tests.
_CONFTEST = '''
import torch
import transformers

from neural_mp.compat.inc.import_aliases import THEIRS, register

register(THEIRS)


def decoder(name, *values, **options):
    """A decoder of random weights in place of one of a hub, of the same architecture."""
    torch.manual_seed(0)
    if "opt" in str(name).lower():
        config = transformers.OPTConfig(
            vocab_size=1000, hidden_size=64, num_hidden_layers=2, ffn_dim=128,
            num_attention_heads=4, max_position_embeddings=512, word_embed_proj_dim=64,
        )
        return transformers.OPTForCausalLM(config).eval()
    config = transformers.GPTJConfig(
        vocab_size=1000, n_positions=512, n_embd=32, n_layer=5, n_head=4, rotary_dim=4,
        n_inner=37, bos_token_id=98, eos_token_id=98,
    )
    return transformers.GPTJForCausalLM(config).eval()


transformers.AutoModelForCausalLM.from_pretrained = decoder
'''


@dataclass
class Row:
    """Outcome of a file.

    Attributes:
        name: of the file.
        passed: number of tests.
        skipped: number of tests.
        failures: test → last line of its failure.
    """

    name: str
    passed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Run the files and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repository", required=True, help="git folder of the clone")
    parser.add_argument("--tag", default="v3.9")
    parser.add_argument("--only", default="", help="part of the names of the files")
    parser.add_argument("--out", type=Path, help="Markdown file for the tables")
    options = parser.parse_args()
    rows = []
    for name in FILES:
        if options.only in name:
            source = _git(options.repository, f"{options.tag}:{_FOLDER}/{name}")
            rows.append(_outcome(name, source))
    _show(rows)
    if options.out is not None:
        options.out.write_text(_markdown(rows), encoding="utf-8")


def _git(repository: str, path: str) -> str:
    command = ["git", "-C", repository, "show", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _outcome(name: str, source: str) -> Row:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "conftest.py").write_text(_CONFTEST, encoding="utf-8")
        (folder / Path(name).name).write_text(source, encoding="utf-8")
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            subprocess.run(
                [*command, f"--junitxml={report}", Path(name).name],
                cwd=folder,
                env={**os.environ, **more},
                capture_output=True,
                timeout=_LONGEST,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Row(name, failures={"all": f"no end within {_LONGEST} seconds"})
        return _read(name, report)


def _read(name: str, report: Path) -> Row:
    row = Row(name)
    for case in ElementTree.parse(report).iter("testcase"):
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is not None:
            row.failures[str(case.get("name"))] = _reason(problem)
        elif case.find("skipped") is not None:
            row.skipped += 1
        else:
            row.passed += 1
    return row


def _reason(problem: ElementTree.Element) -> str:
    """Return the line of a failure that names its cause."""
    message = (problem.get("message") or "").strip()
    text = (problem.text or "no message").strip()
    if message == "collection failure":  # the cause is the last error of the traceback
        errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        message = errors[-1] if errors else text.splitlines()[-1]
    return re.sub(r"\s+", " ", (message or text).splitlines()[0])[:160]


_HEADINGS = ("file", "passed", "failed", "skipped")


def _cells(row: Row) -> tuple[str, ...]:
    return (row.name, str(row.passed), str(len(row.failures)), str(row.skipped))


def _show(rows: list[Row]) -> None:
    console = Console()
    table = Table(*_HEADINGS)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for row in rows:
        for test, line in row.failures.items():
            console.print(f"{Path(row.name).stem}: {test}: {line}", markup=False, soft_wrap=True)
    passed = sum(row.passed for row in rows)
    console.print(f"{passed} of {passed + sum(len(row.failures) for row in rows)} passed")


def _markdown(rows: list[Row]) -> str:
    lines: list[tuple[str, ...]] = [_HEADINGS, ("---",) * len(_HEADINGS), *map(_cells, rows)]
    lines += [("", "", "", ""), ("test", "reason", "", "")]
    for row in rows:
        lines += [(test, line.replace("|", "/"), "", "") for test, line in row.failures.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
