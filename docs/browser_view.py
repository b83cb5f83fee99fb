"""The pictures of the browser view, from real runs, in an installed Chromium.

    python -m docs.browser_view [--out docs/pictures]

Three nets are tuned in one workspace, which `neural-mp ui` serves. Playwright opens the list and a
run, edits one op to FP32, predicts and replays. The list and the trials are also shown as on a
phone, in light and dark.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from benchmarks.measurement.search_data import Digits
from benchmarks.nets.search_nets import onnx_file

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMMAND = (sys.executable, "-m", "neural_mp.cli.entry_point")
#: Net → the strategies of its runs.
RUNS = {"easy": ("mincut",), "residual1": ("random",), "residual3": ("random", "basic")}
CONF = """
model: {{name: {net}.onnx, runtime: source}}
mixed_precision: {{precisions: int8}}
quantization:
  calibration: {{dataloader: {{batch_size: 50, dataset: {{numpy: {{path: train.npz}}}}}}}}
evaluation:
  accuracy:
    metric: accuracy
    dataloader: {{batch_size: 100, dataset: {{numpy: {{path: test.npz}}}}}}
tuning:
  strategy: {{name: {strategy}}}
  exit_policy: {{max_trials: 6}}
"""
#: Milliseconds for a replay.
PATIENCE = 180_000
#: Widths of a desktop and of a phone, and their height, in pixels.
DESKTOP, PHONE, HEIGHT = 1400, 390, 840
COLOURS = 256


def tune_nets(folder: Path) -> None:
    """Tune the nets of `RUNS` in a workspace of the folder."""
    for split in ("train", "test"):
        data = Digits(split)
        np.savez(folder / f"{split}.npz", inputs=data.images, labels=data.labels)
    for net, strategies in RUNS.items():
        shutil.copy(onnx_file(net), folder / f"{net}.onnx")
        for strategy in strategies:
            (folder / "conf.yaml").write_text(CONF.format(net=net, strategy=strategy))
            subprocess.run([*COMMAND, "tune", "conf.yaml", "--quiet"], cwd=folder, check=False)


def save(path: Path, *pictures: bytes) -> None:
    """Save pictures side by side, with few colours."""
    images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    gap = 16
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    whole = Image.new("RGB", (width, max(image.height for image in images)), "white")
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width + gap
    whole.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_pages(browser: Any, address: str, out: Path) -> None:
    """Write the pictures of the pages at an address."""
    context = browser.new_context(viewport={"width": DESKTOP, "height": HEIGHT})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(address)
    save(out / "ui_runs.png", page.locator("main").screenshot())
    page.get_by_role("link", name="easy.onnx").last.click()
    card, choices = page.locator("#edit"), page.locator("#edits select")
    in_int8 = [at for at in range(choices.count()) if choices.nth(at).input_value() == "int8"]
    choices.nth(in_int8[0]).select_option("fp32")
    page.get_by_role("button", name="Predict").click()
    page.locator("#prediction dl").wait_for()
    save(out / "ui_edit.png", card.screenshot())
    page.get_by_role("button", name="Replay").click()
    page.wait_for_url("**#trial=*")
    page.locator("#replayed").filter(has_text="Replayed").wait_for()
    page.mouse.move(0, 0)
    save(out / "ui_replayed.png", page.locator(".two", has_text="Trials").first.screenshot())
    print(page.locator("#replayed").text_content())
    run = page.url.partition("?")[0]
    context.close()
    phones = []
    for scheme, url, mark in (("light", address, "main"), ("dark", f"{run}#trial=2", "#edit")):
        context = browser.new_context(
            viewport={"width": PHONE, "height": HEIGHT}, color_scheme=scheme
        )
        page = context.new_page()
        page.goto(address)
        page.goto(url)
        page.locator(mark).scroll_into_view_if_needed()
        page.evaluate("mark => document.querySelector(mark).scrollIntoView()", mark)
        phones.append(page.screenshot())
        context.close()
    save(out / "ui_phone.png", *phones)


def main() -> None:
    """Tune, serve and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    chosen = parser.parse_args()
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        raise SystemExit("there is no Chromium here; no pictures")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        tune_nets(folder)
        serve = [*COMMAND, "ui", "neural_mp_workspace", "--port", "0"]
        with subprocess.Popen(serve, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            match = re.search(r"http\S+", server.stdout.readline() if server.stdout else "")
            browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
            try:
                draw_pages(browser, match[0] if match else "", chosen.out)
            finally:
                browser.close()
                server.terminate()


if __name__ == "__main__":
    main()
