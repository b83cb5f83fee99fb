"""Fingerprint of a run, and the differences between two fingerprints."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from neural_mp.core import hardware
from neural_mp.util.fingerprint import FINGERPRINT_VERSION, code_fingerprint
from neural_mp.util.system.environment import list_numeric_variables, read_package_versions

#: Suffix of keys with detailed fingerprints; runs of earlier versions have only the key without it.
_DETAIL = " in detail"


def in_detail(**subjects: object) -> dict[str, str]:
    """Fingerprint the code of functions and objects, by display name, as a part of a fingerprint.

    Returns:
        Key → fingerprint as JSON, without subjects that cannot be fingerprinted.
    """
    # Bytecode differs between versions of Python.
    versions = f"{sys.version_info.major}.{sys.version_info.minor}, form {FINGERPRINT_VERSION}"
    fingerprints = {}
    for name, subject in subjects.items():
        code = code_fingerprint(subject)
        if code is not None:
            values = {"python": versions, "digest": code.digest, "options": dict(code.options)}
            fingerprints[name + _DETAIL] = json.dumps(values, sort_keys=True)
    return fingerprints


def list_differences(previous: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """List as text the parts of a fingerprint that differ from those of another run."""
    plain = [k for k in current if not k.endswith(_DETAIL) and previous.get(k) != current[k]]
    more = []
    for key in current:
        name = key.removesuffix(_DETAIL)
        if (
            key.endswith(_DETAIL)
            and name not in plain
            and previous.get(key, current[key]) != current[key]
        ):
            more += _describe_changes(name, json.loads(previous[key]), json.loads(current[key]))
    return plain + more


def _describe_changes(
    name: str, previous: Mapping[str, Any], current: Mapping[str, Any]
) -> list[str]:
    """Describe how the code or options of a subject differ; empty if they are equal."""
    old, new = previous["options"], current["options"]
    changed = [option for option in {**old, **new} if old.get(option) != new.get(option)]
    if previous["python"] != current["python"]:
        changed = [option for option in changed if option in old and option in new]
    elif previous["digest"] == current["digest"]:
        return []
    if not changed:
        return [f"code of the {name}"] if previous["python"] == current["python"] else []
    parts = (f"{o} = {new.get(o, 'none')}, before {old.get(o, 'none')}" for o in changed)
    return [f"{name} ({'; '.join(parts)})"]


def describe_machine_key(packages: tuple[str, ...]) -> dict[str, str]:
    """Return what affects numerics and latency: machine, package versions, environment."""
    host = hardware.detect()
    return {
        "cpu": host.name,
        "flags": " ".join(sorted(host.flags)),
        "cores": str(host.cores),
        "forced": " ".join(sorted(host.forced)),
        **read_package_versions(("neural-mp", "numpy", *packages)),
        **list_numeric_variables(),
    }
