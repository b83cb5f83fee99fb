"""A changed file loads or is refused in one error, and nothing in it runs.

`attack.py` changes many more files, of all frameworks, in processes of their own.
"""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_nets import graph, op

import neural_mp
from neural_mp import ExitPolicy, MixedPrecision, NeuralMPError
from neural_mp.config import load_settings
from neural_mp.core.plan import load_plan_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
MANIFEST, PLAN, CONF = "neural_mp.json", "plan.yaml", "conf.yaml"
READ = {PLAN: load_plan_file, CONF: load_settings}
VALUES = (None, [], {}, -1, 0, 10**30, float("nan"), True, "", "\0", "int8", "../../x", "os:system")


class Touches:
    """A pickle that makes a file when it is read."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


@pytest.fixture(scope="module")
def canary(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("canary") / "ran"


@pytest.fixture(scope="module")
def programs(canary) -> tuple[bytes, ...]:
    """Code in the forms in which files can hold some."""
    call = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    return (
        pickle.dumps(Touches(canary)),
        call.encode(),
        f"!!python/object/apply:pathlib.Path.touch [{canary}]\n".encode(),
        f"!!python/object/apply:builtins.eval [{json.dumps(call)}]\n".encode(),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    """A saved INT8 model, and a tuning file."""
    weights = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    net = graph([op("MatMul", "x w", "y")], {"x": ["n", 3]}, ["y"], {"w": weights})
    folder = tmp_path_factory.mktemp("whole")
    result = MixedPrecision(
        model=net,
        precisions="int8",
        calib_dataloader=[(X, None)],
        exit_policy=ExitPolicy(performance_only=True),
        workspace=folder / "workspace",
    ).fit()
    result.save(folder / "saved")
    saved = {file.name: file.read_bytes() for file in (folder / "saved").iterdir()}
    return {**saved, CONF: (ROOT / "conf" / "image_classification.yaml").read_bytes()}


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """All (container, key) of nested lists and dicts."""
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from places(tree[key])


def changed_text(data: st.DataObject, text: str, yaml_: bool) -> bytes:
    tree = copy.deepcopy(yaml.safe_load(text) if yaml_ else json.loads(text))
    above, key = data.draw(st.sampled_from(list(places(tree))))
    if data.draw(st.booleans()):
        above[key] = data.draw(st.sampled_from(VALUES))
    else:
        del above[key]
    return (yaml.safe_dump(tree) if yaml_ else json.dumps(tree)).encode()


def changed_bytes(data: st.DataObject, whole: bytes, programs: tuple[bytes, ...]) -> bytes:
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.sampled_from((start, start + 1, start + 8, len(whole))))
    put = data.draw(st.binary(max_size=8) | st.sampled_from(programs))
    return whole[:start] + put + whole[stop:]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_changed_file_loads_or_is_refused_and_nothing_in_it_runs(
    files, programs, canary, tmp_path_factory, data
):
    name = data.draw(st.sampled_from(sorted(files)))
    whole, text = files[name], name.endswith((".yaml", ".json"))
    if text and data.draw(st.booleans()):
        changed = changed_text(data, whole.decode(), name.endswith(".yaml"))
    else:
        changed = changed_bytes(data, whole, programs)
    folder = tmp_path_factory.mktemp("changed")
    now = {**files, name: changed}
    if name != MANIFEST and data.draw(st.booleans()):  # as whoever means harm does
        manifest = json.loads(files[MANIFEST])
        for file in manifest["files"]:
            manifest["files"][file] = hashlib.sha256(now[file]).hexdigest()
        now[MANIFEST] = json.dumps(manifest).encode()
    for file, content in now.items():
        (folder / file).write_bytes(content)
    calls: list[Callable[[], object]] = [lambda: neural_mp.load(folder)(X)]
    if name in READ:
        calls.append(lambda: READ[name](folder / name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            with suppress(NeuralMPError):
                call()
    shutil.rmtree(folder)
    assert not canary.exists()


def test_what_a_program_in_a_file_does_is_seen(programs, canary):
    pickle.loads(programs[0])
    assert canary.exists()
    canary.unlink()
    eval(programs[1])
    assert canary.exists()
    canary.unlink()
