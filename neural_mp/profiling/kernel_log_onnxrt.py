"""ONNX Runtime's profile: a list of events in JSON, of which those of nodes are kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neural_mp.errors import NeuralMPError
from neural_mp.profiling.kernel_records import KernelCall, KernelLog
from neural_mp.util.validators import amount, anything, fields, list_of, mapping_of, text

#: How events of nodes are called that only wait: what a device still had to do.
_FENCES = ("_fence_before", "_fence_after")
#: Ops whose time is that of the nodes within them, which have events of their own.
_AROUND_OTHERS = ("If", "Loop", "Scan")
_EMPTY = "the profile has no event of a node; end_profiling() must come after the model has run"


_TENSORS = list_of(mapping_of(list_of(anything)))
_EVENT = fields(
    {
        "dur": amount,
        "args": fields(
            {
                "op_name": text,
                "provider": text,
                "input_type_shape": _TENSORS,
                "output_type_shape": _TENSORS,
            },
            ("provider", "input_type_shape", "output_type_shape"),
        ),
    }
)


def is_profile(content: Any) -> bool:
    """Whether JSON is a list of events."""
    return isinstance(content, list) and all(isinstance(event, dict) for event in content)


def read_profile(events: Sequence[Mapping[str, Any]]) -> KernelLog:
    """The kernels of a profile; events that lack their time or their op count as malformed."""
    calls, malformed = [], 0
    for event in events:
        if event.get("cat") != "Node" or str(event.get("name", "")).endswith(_FENCES):
            continue
        try:
            said = _EVENT(event)
        except NeuralMPError:
            malformed += 1
            continue
        details = said["args"]
        if details["op_name"] not in _AROUND_OTHERS:
            calls.append(_call(details["op_name"], details, said["dur"] / 1000))
    why = "" if calls else _EMPTY
    return KernelLog(tuple(calls), malformed, "", "ONNX Runtime", why)


def _call(op: str, details: Mapping[str, Any], milliseconds: float) -> KernelCall:
    provider = details.get("provider", "")
    short = provider.removesuffix("ExecutionProvider")
    read, written = (
        [
            (kind, "x".join(map(str, sizes)))
            for tensor in details.get(f"{side}_type_shape", ())
            for kind, sizes in tensor.items()
        ]
        for side in ("input", "output")
    )
    dtypes = {f"input {place}": kind for place, (kind, _) in enumerate(read)}
    dtypes |= {f"output {place}": kind for place, (kind, _) in enumerate(written)}
    return KernelCall(
        op,
        f"{op}:{short}" if short else op,
        "",
        dtypes,
        ":".join(sizes for _, sizes in read),
        milliseconds,
        provider,
    )
