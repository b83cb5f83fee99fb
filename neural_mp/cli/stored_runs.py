"""Records of runs in workspaces and saved results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from neural_mp.errors import HistoryError

if TYPE_CHECKING:
    from neural_mp.runs.report import RunRecord


def read_run(
    workspace: Path | None,
    storage: str | None = None,
    number: int | None = None,
    model: str | None = None,
) -> RunRecord:
    """Return the record of a run.

    Raises:
        HistoryError: no such run is stored.
    """
    from neural_mp.api.saved_model import RECORD_FILE
    from neural_mp.config.options import DEFAULT_WORKSPACE
    from neural_mp.runs.history import HISTORY_FILE, read_record, storage_url
    from neural_mp.runs.record_schema import read_record_file
    from neural_mp.util.validators import file_path, validate_option

    if storage is not None:
        return read_record(storage_url(DEFAULT_WORKSPACE, storage), number, model)
    workspace = Path(DEFAULT_WORKSPACE) if workspace is None else workspace
    validate_option("the workspace", file_path, workspace)
    if (workspace / HISTORY_FILE).is_file():
        return read_record(storage_url(workspace), number, model)
    if (workspace / RECORD_FILE).is_file():
        if number is not None or model is not None:
            raise HistoryError(
                f"--run and --model require a workspace, got the saved result {str(workspace)!r}; "
                f"remove them"
            )
        return read_record_file(workspace / RECORD_FILE)
    what = "contains no runs" if workspace.is_dir() else "is not a folder"
    raise HistoryError(
        f"{str(workspace)!r} {what}; give the workspace of a run (default: neural_mp_workspace) or "
        f"the folder of a saved result"
    )
