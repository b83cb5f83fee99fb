"""Compilation and runs of one file by the QNN execution provider; runs in a child process.

A process serves one set of provider options: sessions with several fail to run. The first argument
is a folder with the job; the results go to the same folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

PROVIDER = "QNNExecutionProvider"
#: Files of a job in its folder: the model, the options and the inputs; the report, the outputs, and
#: the folder with the provider's own description of its graphs.
MODEL, OPTIONS, INPUTS = "model.onnx", "options.json", "inputs.npz"
REPORT, OUTPUTS, GRAPHS = "report.json", "outputs.npz", "graphs"
#: Keys of a report: provider → its nodes as type and name, and the errors of the two steps.
ASSIGNED, COMPILE_ERROR, RUN_ERROR = "assigned", "compile_error", "run_error"
_WARNING = 2


def array_key(sample: int, position: int) -> str:
    """Return the key of an input or output of a sample in a file."""
    return f"{sample}.{position}"


def _create_session(
    folder: Path, options: Mapping[str, str], *, may_use_cpu: bool
) -> ort.InferenceSession:
    import onnxruntime_qnn

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.log_severity_level = _WARNING
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if not may_use_cpu:
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    provider = {
        "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
        "dump_json_qnn_graph": "1",
        "json_qnn_graph_dir": str(folder / GRAPHS),
        "enable_framework_op_trace": "1",
        "framework_op_trace_dir": str(folder / GRAPHS),
        **options,
    }
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    settings.add_provider_for_devices(devices, provider)
    session = ort.InferenceSession(str(folder / MODEL), settings)
    # A run that fails would be repeated on the CPU, with a message on the standard output only.
    session.disable_fallback()
    return session


def _list_assigned_nodes(session: ort.InferenceSession) -> dict[str, list[tuple[str, str]]]:
    assigned: dict[str, list[tuple[str, str]]] = {}
    for part in session.get_provider_graph_assignment_info():
        nodes = [(node.op_type, node.name) for node in part.get_nodes()]
        assigned.setdefault(part.ep_name, []).extend(nodes)
    return assigned


def _run_samples(session: ort.InferenceSession, folder: Path) -> None:
    names = [port.name for port in session.get_inputs()]
    outputs = {}
    with np.load(folder / INPUTS) as inputs:
        count = len(inputs) // max(len(names), 1)
        for sample in range(count):
            feeds = {name: inputs[array_key(sample, i)] for i, name in enumerate(names)}
            for position, array in enumerate(session.run(None, feeds)):
                outputs[array_key(sample, position)] = array
    np.savez(folder / OUTPUTS, **outputs)


def _audit_folder(folder: Path) -> dict[str, Any]:
    """Return the report; only a file that the provider takes whole is run."""
    import onnxruntime_qnn

    options = json.loads((folder / OPTIONS).read_text())
    (folder / GRAPHS).mkdir()
    ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
    report: dict[str, Any] = {ASSIGNED: {}, COMPILE_ERROR: "", RUN_ERROR: ""}
    try:
        session = _create_session(folder, options, may_use_cpu=False)
    except Exception as error:  # noqa: BLE001 (the bindings raise their own types)
        report[COMPILE_ERROR] = str(error)
        try:
            rest = _create_session(folder, options, may_use_cpu=True)
            report[ASSIGNED] = _list_assigned_nodes(rest)
        except Exception as second:  # noqa: BLE001
            report[COMPILE_ERROR] = str(second)
        return report
    report[ASSIGNED] = _list_assigned_nodes(session)
    try:
        _run_samples(session, folder)
    except Exception as error:  # noqa: BLE001
        report[RUN_ERROR] = str(error)
    return report


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    (directory / REPORT).write_text(json.dumps(_audit_folder(directory)))
