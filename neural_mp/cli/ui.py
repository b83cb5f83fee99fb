"""`neural-mp ui`, the browser view of a workspace."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from neural_mp.cli.options import TrustOption
from neural_mp.cli.output import Output
from neural_mp.errors import MissingFrameworkError

_MAX_PORT = 65535


def ui(
    workspace: Annotated[
        Path | None, typer.Argument(help="Workspace of runs; default: neural_mp_workspace.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=_MAX_PORT, help="Port on this machine; 0 for a free one.")
    ] = 8400,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser.")
    ] = False,
    trust: TrustOption = None,
    *,
    out: Output,
) -> None:
    """Serve the runs of a workspace to a browser on this machine."""
    from neural_mp.config import trust_of
    from neural_mp.config.options import DEFAULT_WORKSPACE
    from neural_mp.ui.workspace import Replays, Workspace
    from neural_mp.util.optional_packages import install_command

    try:
        from neural_mp.ui.server import Site, bind_port, serve
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn"):
            raise
        raise MissingFrameworkError(
            f"the browser view requires {package}: {install_command('ui')}"
        ) from error
    runs = Workspace(Path(DEFAULT_WORKSPACE) if workspace is None else workspace)
    replays = Replays(runs.folder, trust_of(trust or ()))
    listener = bind_port(port)
    site = Site(runs, replays, listener.getsockname()[1])
    out.show_line(f"{site.url}\nopen this address in a browser on this machine; Ctrl-C ends")
    if out.as_json:
        out.show_document({"url": site.url, "workspace": str(runs.folder)})
    if open_page and not webbrowser.open(site.url):
        out.show_warning("no browser is available; open the address yourself")
    serve(site, listener)
