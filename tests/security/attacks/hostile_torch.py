"""Hostile files of PyTorch, by all the ways that files are loaded."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from attacks.hostile_archives import CASES, Maker, Net, real_file
from attacks.hostile_transformers import FOLDERS, OTHERS, OtherMaker, Spoiler, real_folder
from attacks.mutated_torch import altered, flipped
from attacks.verdicts import Family, Finding, judged, judged_command

import neural_mp
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.replay import convert_with_plan
from neural_mp.api.saved_model import MANIFEST, PLAN_FILE
from neural_mp.core.plan import PrecisionPlan

NAME = "hostile torch files"


def _tried(path: Path) -> None:
    """Load a model and run it, as every command does."""
    adaptor = adaptor_for(str(path))
    adaptor.predict(adaptor.load(str(path)), torch.ones(4, 4))


def _encoded(folder: Path) -> None:
    """Load an encoder and run it."""
    tokens = {"input_ids": torch.ones(2, 7, dtype=torch.long)}
    adaptor = adaptor_for(str(folder))
    adaptor.predict(adaptor.load(str(folder), example=tokens), tokens)


def saved_folder(folder: Path) -> Path:
    """A model as its owner saves it."""
    path = folder / "saved"
    convert_with_plan(Net().eval(), PrecisionPlan({}), inputs=torch.ones(4, 4)).save(path)
    return path


def hostile_folder(saved: Path, folder: Path, make: Maker, canary: Path) -> Path:
    """A saved model with a hostile program, which its manifest says is as it should be."""
    shutil.copytree(saved, folder)
    program = folder / "model.pt2"
    program.unlink()
    make(saved / "model.pt2", program, canary)
    manifest = folder / MANIFEST
    digest = hashlib.sha256((saved / "model.pt2").read_bytes()).hexdigest()
    text = manifest.read_text()
    assert digest in text
    manifest.write_text(text.replace(digest, hashlib.sha256(program.read_bytes()).hexdigest()))
    return folder


def _loaded(folder: Path) -> None:
    neural_mp.load(folder)(np.ones((4, 4), np.float32))


def _commands(path: Path) -> dict[str, list[str]]:
    """The commands that take a model, for this one."""
    return {
        "inspect": ["inspect", str(path)],
        "benchmark": ["benchmark", str(path), "--iterations", "1"],
        "convert": [
            "convert",
            str(path),
            "--plan",
            str(path.with_name("saved") / PLAN_FILE),
            "--output",
            f"{path}.out",
        ],
    }


#: Case → the command that is given it, too: one of each way to run code.
_COMMANDED = {
    "expression in a size": "inspect",
    "library of AOTInductor": "benchmark",
    "code in an input's name": "convert",
}


def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
    """Make hostile files of a real one, and load them in every way that files are loaded."""
    source, saved = real_file(folder), saved_folder(folder)
    _tried(source)
    _loaded(saved)
    completed = 0
    for case, method, call in chain(_attacks(source, saved, folder), _others(folder)):
        if completed == count:
            return
        completed += 1
        canary = folder / "canary"
        canary.unlink(missing_ok=True)
        yield call(f"{case}: {method}", canary)
    changed = folder / "changed.pt2"
    for number in range(count - completed):
        change = (flipped, altered)[number % 2]
        change(source, changed, random.Random(f"{seed}-{number}"))
        yield judged(NAME, f"{change.__name__}, {number}", lambda: _tried(changed))


def _others(folder: Path) -> Iterator[tuple[str, str, Callable[[str, Path], Finding]]]:
    """The same of folders of `transformers`, and of files of other kinds."""
    real = real_folder(folder)
    for number, (case, spoil) in enumerate(FOLDERS.items()):
        spoilt = folder / f"folder_{number}"

        def loaded(
            name: str, canary: Path, spoil: Spoiler = spoil, spoilt: Path = spoilt
        ) -> Finding:
            shutil.copytree(real, spoilt)
            spoil(spoilt, f"__import__('pathlib').Path({str(canary)!r}).touch()", canary)
            return judged(NAME, name, lambda: _encoded(spoilt), canary=canary)

        yield case, "a folder of transformers", loaded
    for number, (case, make) in enumerate(OTHERS.items()):
        home = folder / f"other_{number}"

        def made(name: str, canary: Path, make: OtherMaker = make, home: Path = home) -> Finding:
            path = make(home, canary)
            return judged(NAME, name, lambda: _tried(path), canary=canary)

        yield case, "a file", made


def _attacks(
    source: Path, saved: Path, folder: Path
) -> Iterator[tuple[str, str, Callable[[str, Path], Finding]]]:
    """(case, way in, what makes the attack)."""
    for number, (case, make) in enumerate(CASES.items()):
        file = folder / f"hostile_{number}.pt2"

        def alone(name: str, canary: Path, make: Maker = make, file: Path = file) -> Finding:
            make(source, file, canary)
            return judged(NAME, name, lambda: _tried(file), canary=canary)

        def in_folder(name: str, canary: Path, make: Maker = make, number: int = number) -> Finding:
            hostile = hostile_folder(saved, folder / f"saved_{number}", make, canary)
            return judged(NAME, name, lambda: _loaded(hostile), canary=canary)

        yield case, "a file", alone
        yield case, "a saved folder", in_folder
        if case in _COMMANDED:

            def commanded(
                name: str, canary: Path, make: Maker = make, file: Path = file, case: str = case
            ) -> Finding:
                make(source, file, canary)
                return judged_command(NAME, name, _commands(file)[_COMMANDED[case]], canary=canary)

            yield case, _COMMANDED[case], commanded


HOSTILE_TORCH = Family(NAME, 500, findings)
