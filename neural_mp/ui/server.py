"""HTTP server of the browser view, for this machine only."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, HistoryError, NeuralMPError, PlanError
from neural_mp.reporting.page import build_comparison_page
from neural_mp.tuning.further_trial import predict_plan
from neural_mp.ui import pages
from neural_mp.ui.replay_main import parse_edits
from neural_mp.ui.workspace import Replay, Replays, StoredRun, Workspace

#: The only address that the server listens on.
HOST = "127.0.0.1"
#: Bytes of a request: edits of 10,000 ops with long names.
_MAX_BODY_BYTES = 1 << 22
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
Endpoint = Callable[[Request, bytes], Response]


@dataclass(frozen=True)
class Site:
    """A served workspace; the methods answer requests.

    Attributes:
        workspace, replays: the runs, and the replays of their plans.
        port: port of the server.
        token: secret of this start, part of the address that the user opens.
    """

    workspace: Workspace
    replays: Replays
    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def url(self) -> str:
        """The address to open."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def list_runs(self, request: Request, body: bytes) -> Response:
        """Return the page of all runs."""
        runs = self.workspace.list_runs()
        return HTMLResponse(pages.build_list_page(runs, str(self.workspace.folder)))

    def show_run(self, request: Request, body: bytes) -> Response:
        """Return the page of a run, to edit the plan of the trial `base`."""
        run, base = self._find_run(request), request.query_params.get("base", "")
        others = [other for other in self.workspace.list_runs() if other.name != run.name]
        latest = self.replays.latest
        replay = latest if latest is not None and latest.run == run.name else None
        return HTMLResponse(pages.build_run_page(run, base, others, replay, self.token))

    def compare_runs(self, request: Request, body: bytes) -> Response:
        """Return the page of two runs."""
        names = request.query_params.getlist("run")
        if len(names) != 2:
            raise ConfigurationError(f"select two runs to compare, got {len(names)}; go back")
        first, second = (self.workspace.get_run(name).require_record() for name in names)
        around = pages.surround_page(pages.draw_way_back(), has_script=False)
        return HTMLResponse(build_comparison_page(first, second, around))

    def show_state(self, request: Request, body: bytes) -> Response:
        """Return the state of a run, or of all, which changes with the pages."""
        name = request.query_params.get("run")
        runs = self.workspace.list_runs() if name is None else [self.workspace.get_run(name)]
        return JSONResponse({"state": pages.sign_runs(runs)})

    def show_replay(self, request: Request, body: bytes) -> Response:
        """Return the state of the latest replay."""
        replay = self.replays.latest
        return JSONResponse(None if replay is None else vars(replay))

    def stop_replay(self, request: Request, body: bytes) -> Response:
        """End the replay."""
        self.replays.stop()
        return self.show_replay(request, body)

    def predict_edits(self, request: Request, body: bytes) -> Response:
        """Return the prediction of an edited plan."""
        return JSONResponse(pages.describe_prediction(self._find_run(request), *_parse_body(body)))

    def replay_edits(self, request: Request, body: bytes) -> Response:
        """Start the replay of an edited plan."""
        run, (base, edits) = self._find_run(request), _parse_body(body)
        reason = pages.explain_missing_replay(run)
        if reason:
            raise ConfigurationError(reason)
        plan = run.get_plan(base)
        predicted = predict_plan(run.require_record(), plan, edits).time
        self.replays.start(Replay(run.name, predicted), plan, edits)
        return self.show_replay(request, body)

    def _find_run(self, request: Request) -> StoredRun:
        return self.workspace.get_run("{model}/{number}".format_map(request.path_params))


def _parse_body(body: bytes) -> tuple[str, dict[str, Precision]]:
    """Return the trial whose plan is edited, and the edits."""
    try:
        document = json.loads(body)
        return str(document["base"]), parse_edits(document["edits"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(f"the edits are no JSON document with base and edits: {error}") from None


@dataclass(frozen=True)
class Guard:
    """ASGI middleware that refuses requests which the user's own pages did not make.

    The host must be this machine, so that no foreign name resolves to the server (DNS rebinding);
    the token must be known, which other users of the machine and other sites do not have; and a
    POST must come from a page of the server.
    """

    app: Starlette
    site: Site

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or refuse it."""

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), v.encode()) for name, v in _HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        await (self._check_request(scope) or self.app)(scope, receive, send_with_headers)

    def _check_request(self, scope: Any) -> Response | None:
        """Return the response to a refused request, or to the first one; None for others."""
        headers, site = Headers(scope=scope), self.site
        hosts = [f"{name}:{site.port}" for name in (HOST, "localhost")]
        if headers.get("host") not in hosts:
            return Response("neural-mp ui serves this machine only", 421)
        cookie_name = f"neural-mp-{site.port}"  # browsers share cookies among ports
        is_reading = scope["method"] in ("GET", "HEAD")
        if is_reading and self._has_token(QueryParams(scope["query_string"]).get("token")):
            response = RedirectResponse(scope["path"], 303)
            response.set_cookie(cookie_name, site.token, httponly=True, samesite="strict")
            return response
        cookie = SimpleCookie(headers.get("cookie", "")).get(cookie_name)
        if cookie is None or not self._has_token(cookie.value):
            return Response("open the address that neural-mp ui has printed", 403)
        is_own = headers.get("origin", f"http://{hosts[0]}") in [f"http://{host}" for host in hosts]
        if not is_reading and not (is_own and self._has_token(headers.get("x-token"))):
            return Response("the request does not come from a page of neural-mp ui", 403)
        return None

    def _has_token(self, text: str | None) -> bool:
        return secrets.compare_digest((text or "").encode(), self.site.token.encode())


def create_app(site: Site) -> Guard:
    """Return the ASGI application of a site."""
    run = "{model}/{number}"
    endpoints: dict[tuple[str, str], Endpoint] = {
        ("GET", "/"): site.list_runs,
        ("GET", "/compare"): site.compare_runs,
        ("GET", "/state"): site.show_state,
        ("GET", "/replay"): site.show_replay,
        ("GET", f"/run/{run}"): site.show_run,
        ("POST", "/stop"): site.stop_replay,
        ("POST", f"/predict/{run}"): site.predict_edits,
        ("POST", f"/replay/{run}"): site.replay_edits,
    }
    routes = [Route(path, _bind(e), methods=[verb]) for (verb, path), e in endpoints.items()]
    return Guard(Starlette(routes=routes, exception_handlers={NeuralMPError: _show_error}), site)


def _bind(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that reads the body, then answers in a thread."""

    async def handle(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise PlanError(f"the edits must have at most {_MAX_BODY_BYTES} bytes, got more")
        return await run_in_threadpool(endpoint, request, body)

    return handle


def _show_error(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, HistoryError) else 400
    if request.method == "POST":
        return JSONResponse({"error": str(error)}, status)
    return HTMLResponse(pages.build_error_page(str(error)), status)


def bind_port(port: int) -> socket.socket:
    """Return a socket that listens on a port of this machine; on a free one for 0.

    Raises:
        ConfigurationError: the port cannot be used.
    """
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise ConfigurationError(
            f"the port {port} cannot be used: {error.strerror}; give another --port, or 0 for a "
            f"free one"
        ) from None


def serve(site: Site, listener: socket.socket) -> None:
    """Answer requests until Ctrl-C or SIGTERM, then end a running replay."""
    config = uvicorn.Config(
        create_app(site), log_level="error", access_log=False, server_header=False, lifespan="off"
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        site.replays.stop()
        listener.close()
