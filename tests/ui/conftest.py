"""One workspace for all tests of the browser view."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_here import run_main
from quick_runs import give_nominal_times
from served_runs import write_classifier

from neural_mp import MixedPrecision, common


@pytest.fixture(scope="session")
def served_folder(digits, tmp_path_factory) -> Path:
    """A folder with three runs: of a tuning file, of data files alone, and of objects."""
    folder = tmp_path_factory.mktemp("served")
    write_classifier(folder, digits)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        give_nominal_times(patch)
        for source in (
            ("conf.yaml", "--output", "tuned"),
            ("digits.onnx", "--data", "test.npz", "--metric", "accuracy", "--tolerance", "5%"),
        ):
            code, _, err = run_main("tune", *source)
            assert code in (0, 5), err  # such a small net may be no faster in INT8
        data = dict(np.load("test.npz"))
        dataset = list(zip(data["inputs"], data["labels"], strict=True))
        MixedPrecision(
            model="digits.onnx",
            metric="accuracy",
            eval_dataloader=common.DataLoader(dataset, batch_size=100),
            strategy="random",
            exit_policy={"max_trials": 3},
        )()
    return folder
