"""What a run is about, and where that differs from what another one is about."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from neural_mp.core import hardware
from neural_mp.util.environment import numeric_variables, versions_of
from neural_mp.util.fingerprint import FINGERPRINT_VERSION, code_fingerprint

#: Ends the name of what can be told in detail; runs of earlier versions have no such key, and what
#: they have under the name without it counts.
_DETAIL = " in detail"


def in_detail(**subjects: Any) -> dict[str, str]:
    """What functions and objects do, as a part of a fingerprint.

    Args:
        **subjects: what people call it → the function, the object or a list of them.

    Returns:
        Nothing for what cannot be told.
    """
    found = {}
    for name, subject in subjects.items():
        told = code_fingerprint(subject)
        if told is not None:
            values = {"python": _python(), "digest": told.digest, "options": dict(told.options)}
            found[name + _DETAIL] = json.dumps(values, sort_keys=True)
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What a run is about that differs from what another one was about, in words."""
    plain = [key for key in now if not key.endswith(_DETAIL) and before.get(key) != now[key]]
    more = []
    for key in now:
        name = key.removesuffix(_DETAIL)
        if key.endswith(_DETAIL) and name not in plain and before.get(key, now[key]) != now[key]:
            more += _in_words(name, json.loads(before[key]), json.loads(now[key]))
    return plain + more


def _in_words(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where something does another thing than before, if it does."""
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
    """Bytecode differs from one version to the next, as does what is made of it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}, form {FINGERPRINT_VERSION}"


def machine_key(packages: tuple[str, ...]) -> dict[str, str]:
    """What decides on numbers and times of a model, beside itself.

    Args:
        packages: the framework's packages.

    Returns:
        Word → the CPU, the versions, and the variables that tell libraries how to compute.
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
