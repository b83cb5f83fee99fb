"""Requests that the browser view refuses, and the errors of its command."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from command_here import run_main
from served_runs import LAYERS, serve_workspace

from neural_mp.ui.workspace import Workspace

pytestmark = pytest.mark.slow


class Client:
    """Requests with the token of the printed address, unless a test changes the headers."""

    def __init__(self, url: str) -> None:
        self.host, self.token = urlsplit(url).netloc, url.partition("token=")[2]
        self.cookie = f"neural-mp-{self.host.rpartition(':')[2]}={self.token}"

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, timeout=600)
        sent = {"Cookie": self.cookie, "X-Token": self.token}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, {k: v for k, v in sent.items() if v})
        response = connection.getresponse()
        self.headers = response.headers
        return response.status, response.read().decode()


@pytest.fixture(scope="module")
def client(served_folder) -> Iterator[Client]:
    with serve_workspace(served_folder) as url:
        yield Client(url)


@pytest.fixture(scope="module")
def run(served_folder) -> str:
    """Name of the run of the tuning file."""
    return Workspace(served_folder / "neural_mp_workspace").list_runs()[-1].name


def edits(**precisions: str) -> bytes:
    return json.dumps({"base": "0", "edits": precisions}).encode()


def test_the_pages_are_for_the_holder_of_the_token_alone(client):
    assert client.send("GET", "/")[0] == 200
    assert client.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert client.headers["Cache-Control"] == "no-store"
    assert client.send("GET", "/", Cookie="")[0] == 403
    assert client.send("GET", "/", Cookie=client.cookie[:-1])[0] == 403
    assert client.send("GET", "/?token=guess", Cookie="")[0] == 403
    assert client.send("GET", f"/?token={client.token}", Cookie="")[0] == 303
    cookie = client.headers["Set-Cookie"]
    assert client.cookie in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:80", "[::1]:80"])
def test_a_foreign_name_of_the_machine_is_refused(client, host):
    """DNS rebinding: the name of a foreign site that resolves to this machine."""
    assert client.send("GET", "/", Host=host)[0] == 421
    assert client.send("POST", "/stop", Host=host)[0] == 421


@pytest.mark.parametrize("path", ["/stop", "/predict/{}", "/replay/{}"])
@pytest.mark.parametrize(
    "headers", [{"X_Token": ""}, {"X_Token": "guess"}, {"Origin": "http://evil.example"}]
)
def test_a_post_of_another_site_is_refused(client, run, path, headers):
    assert client.send("POST", path.format(run), edits(), **headers)[0] == 403


def test_an_edit_is_predicted_with_its_plan(client, run):
    status, text = client.send("POST", f"/predict/{run}", edits(scores="fp32"))
    assert status == 200
    answer = json.loads(text)
    assert [name for name, _ in answer["rows"]][:2] == ["Time", "SQNR of quantized tensors"]
    assert "scores: {precision: fp32}" in answer["plan"] or "scores: fp32" in answer["plan"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/predict/{}", edits(hiden="fp32"), "did you mean 'hidden'"),
        ("/predict/{}", edits(hidden="fp8"), "fp8"),
        ("/predict/{}", b'{"base": "9", "edits": {}}', "has no trial of number '9'"),
        ("/predict/{}", b'{"base": "0", "edits": []}', "mapping op → precision"),
        ("/predict/{}", b"[" * 100_000, "no JSON document"),
        ("/predict/{}", b"\xff", "no JSON document"),
        ("/predict/{}", b"1" * (1 << 22) + b"1", "at most 4194304 bytes"),
        ("/predict/0/tuning-0001", edits(), "there is no run '0/tuning-0001'"),
        ("/replay/{}", edits(hidden="int4"), "must run in int8, fp32, got int4"),
    ],
)
def test_a_wrong_edit_is_one_error(client, run, path, body, message):
    status, text = client.send("POST", path.format(run), body)
    assert status in (400, 404)
    assert message in json.loads(text)["error"]


@pytest.mark.parametrize("path", ["/run/{}?base=x", "/run/{}x", "/compare?run={}", "/run/../x"])
def test_a_page_that_does_not_exist_is_no_crash(client, run, path):
    assert client.send("GET", path.format(run))[0] in (400, 404)


def test_an_address_cannot_inject_markup(client, run):
    status, text = client.send("GET", f"/run/{run}?base=%22%3E%3Cscript%3Ealert(1)%3C/script%3E")
    assert status == 404
    assert "&lt;script&gt;alert" in text
    assert "<script>alert" not in text


def test_the_server_listens_on_this_machine_alone(client, served_folder):
    port = int(client.host.rpartition(":")[2])
    listening = [
        connection.laddr.ip
        for child in psutil.Process().children(recursive=True)
        for connection in child.net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]


def test_reading_pages_writes_no_file(client, served_folder, run):
    def list_files() -> set[Path]:
        return {path for path in served_folder.rglob("*") if "-journal" not in path.name}

    before = list_files()
    for path in ("/", f"/run/{run}", "/state", f"/compare?run={run}&run={run}"):
        assert client.send("GET", path)[0] == 200
    client.send("POST", f"/predict/{run}", edits(**dict.fromkeys(LAYERS, "fp32")))
    assert list_files() == before


def test_a_missing_workspace_and_a_port_in_use_are_one_line(served_folder, tmp_path):
    code, _, err = run_main("ui", str(tmp_path))
    assert code == 2
    assert "contains no runs; give the workspace of a run" in err
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        workspace = str(served_folder / "neural_mp_workspace")
        code, _, err = run_main("ui", workspace, "--port", port)
    assert code == 2
    assert f"the port {port} cannot be used" in err


def test_a_missing_package_names_the_extra(served_folder, monkeypatch):
    loaded = [name for name in sys.modules if name.partition(".")[0] == "starlette"]
    for name in ("starlette", *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "neural_mp.ui.server", raising=False)
    code, _, err = run_main("ui", str(served_folder / "neural_mp_workspace"))
    assert code == 2
    assert "the browser view requires starlette" in err
    assert "[ui]" in err
