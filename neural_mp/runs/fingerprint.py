"""Fingerprint of a run, and the differences between two fingerprints."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from neural_mp.core import hardware
from neural_mp.util.environment import numeric_variables, versions_of
from neural_mp.util.fingerprint import FINGERPRINT_VERSION, code_fingerprint

#: Suffix of keys with detailed fingerprints; runs of earlier versions have only the key without it.
_DETAIL = " in detail"


def in_detail(**subjects: Any) -> dict[str, str]:
    """Fingerprint the code of functions and objects, by display name, as a part of a fingerprint.

    Returns:
        Key → fingerprint as JSON, without subjects that cannot be fingerprinted.
    """
    found = {}
    for name, subject in subjects.items():
        code = code_fingerprint(subject)
        if code is not None:
            values = {"python": _python(), "digest": code.digest, "options": dict(code.options)}
            found[name + _DETAIL] = json.dumps(values, sort_keys=True)
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """List as text the parts of a fingerprint that differ from those of another run."""
    plain = [key for key in now if not key.endswith(_DETAIL) and before.get(key) != now[key]]
    more = []
    for key in now:
        name = key.removesuffix(_DETAIL)
        if key.endswith(_DETAIL) and name not in plain and before.get(key, now[key]) != now[key]:
            more += _describe_changes(name, json.loads(before[key]), json.loads(now[key]))
    return plain + more


def _describe_changes(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe how the code or options of a subject differ; empty if they are equal."""
    old, new = before["options"], now["options"]
    changed = [option for option in {**old, **new} if old.get(option) != new.get(option)]
    if before["python"] != now["python"]:
        changed = [option for option in changed if option in old and option in new]
    elif before["digest"] == now["digest"]:
        return []
    if not changed:
        return [f"code of the {name}"] if before["python"] == now["python"] else []
    parts = (f"{o} = {new.get(o, 'none')}, before {old.get(o, 'none')}" for o in changed)
    return [f"{name} ({'; '.join(parts)})"]


def _python() -> str:
    """Return the Python and fingerprint versions, since bytecode differs between versions."""
    return f"{sys.version_info.major}.{sys.version_info.minor}, form {FINGERPRINT_VERSION}"


def machine_key(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the properties of machine and software that affect numerics and latency.

    Returns:
        Name → CPU, package versions, and environment variables that control computation.
    """
    here = hardware.detect()
    return {
        "cpu": here.name,
        "flags": " ".join(sorted(here.flags)),
        "cores": str(here.cores),
        "forced": " ".join(sorted(here.forced)),
        **versions_of(("neural-mp", "numpy", *packages)),
        **numeric_variables(),
    }
