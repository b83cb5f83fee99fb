"""Integer kernel variants that work on this machine, and their INT8 accumulation.

Every variant runs once in a child process (see `common.kernels.runtime_probe`) on extreme integers,
and must match the float op on the same quantized values within one step.
"""

from __future__ import annotations

import os
from functools import lru_cache

from neural_mp.adaptors.common.kernels.int8_accumulation import (
    KernelAccumulation,
    accumulation_of_cases,
    accumulation_on_target,
)
from neural_mp.adaptors.common.kernels.runtime_probe import (
    ONEDNN_LIMIT,
    find_installed_version,
    probe_results,
)
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS
from neural_mp.core.hardware import Hardware

#: Prefixes of a variant in the child's output: correct with weights of ±63, or also with ±127.
WORKS, EXACT = "works ", "exact "
#: Increment when the probes change.
_VERSION = 4
FORMS = tuple(f"{op} {form}" for op, layer in LAYERS.items() for form in layer.kernel_forms)
#: Ops that are run once in BF16: with instructions disabled, oneDNN refuses BF16 although
#: TensorFlow assumes its support, and ends the process in training.
BF16_CASES = ("bf16 Conv2D", "bf16 MatMul", "bf16 MaxPool")


def _probe_facts(onednn_limit: str | None) -> frozenset[str]:
    module = "neural_mp.adaptors.tensorflow.kernels.int8_accumulation_probe"
    version = find_installed_version(
        "tensorflow", "tensorflow-cpu", "intel-tensorflow", "tf-nightly"
    )
    return probe_results(module, f"{_VERSION} {version}", onednn_limit)


@lru_cache(maxsize=1)
def forms_that_work() -> frozenset[str]:
    """Return the integer kernel variants with correct results here, e.g. `Conv2D Sum`."""
    return frozenset(f.removeprefix(WORKS) for f in _probe_facts(None) if f.startswith(WORKS))


def find_bf16_obstacle() -> str | None:
    """Return why no op runs in BF16 here; None if BF16 works."""
    if {f"{WORKS}{case}" for case in BF16_CASES} <= _probe_facts(None):
        return None
    limit = os.environ.get(ONEDNN_LIMIT)
    if limit is None:
        return "TensorFlow's BF16 kernels fail on this machine"
    return (
        f"TensorFlow's BF16 kernels fail with {ONEDNN_LIMIT}={limit}; also set "
        f"TF_ENABLE_ONEDNN_OPTS=0, as on a CPU with these instructions only"
    )


def int8_accumulation(hardware: Hardware) -> KernelAccumulation:
    """Return the accumulation of each kernel kind on the target machine."""

    def probe_kernels(onednn_limit: str | None) -> KernelAccumulation:
        facts = _probe_facts(onednn_limit)
        working = [form for form in FORMS if f"{WORKS}{form}" in facts]
        exact = [_case_from_form(form) for form in working if f"{EXACT}{form}" in facts]
        return accumulation_of_cases(exact, map(_case_from_form, working))

    return accumulation_on_target(hardware, probe_kernels)


def _case_from_form(form: str) -> str:
    layer, _, rest = form.partition(" ")
    return f"{LAYERS[layer].kind} {rest}"
