"""`neural-mp hardware`."""

from __future__ import annotations

from neural_mp.cli.errors import epilog
from neural_mp.cli.output import Output

EPILOG = epilog("hardware", "hardware --json | jq .cpu.bf16.native")


def hardware(*, out: Output) -> None:
    """Show the precisions that run natively, and whether INT8 kernels are exact."""
    from neural_mp.adaptors.registry import installed_accumulation
    from neural_mp.core import hardware as machine
    from neural_mp.core.precision import Precision
    from neural_mp.reporting import hardware_table

    host = machine.detect()
    with out.working("Reading the kernels of the installed frameworks"):
        products = installed_accumulation(host)
    out.show(hardware_table(host, products))
    if out.as_json:
        supports = {p.value: vars(host.support(p)) for p in Precision}
        described = {"name": host.name, "cores": host.cores, "cpu": supports}
        out.document({**described, "int8_accumulation": products})
