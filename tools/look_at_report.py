"""Looks at a replay's report in a real browser: `python tools/look_at_report.py REPORT.html`.

The report is opened in a headless Chromium at the width of a phone and of a desktop, in light and in dark. For each
view the tool prints its faults: errors in the console, requests to anything but the file itself, how far the page
scrolls to the side, and texts in pictures that overlap or are cut off. The exit status is 1 if there is a fault.
`--pictures FOLDER` writes a screenshot of each view, FOLDER/REPORT-WIDTH-SCHEME.png. `--top PIXELS` keeps only the top
of it. `--json` prints a list of the views.

It needs Debian's package `chromium`, or another Chromium or Chrome on the path, and no package of Python: the browser
is told what to do by Chrome's DevTools protocol, JSON over a pipe.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
SECONDS = 60

# Finds texts in SVG pictures that are cut off or overlap. Boxes of letters always overlap a little: that is allowed.
FIND_FAULTS = """
(() => {
  const faults = [], opened = [...document.querySelectorAll("details:not([open])")];
  opened.forEach(folded => folded.open = true);
  for (const picture of document.querySelectorAll("svg")) {
    const frame = picture.getBoundingClientRect();
    const texts = [...picture.querySelectorAll("text")].filter(text => text.textContent.trim());
    const boxes = texts.map(text => text.getBoundingClientRect());
    boxes.forEach((box, i) => {
      if (box.width === 0) return;
      const across = Math.max(frame.left - box.left, box.right - frame.right);
      const out = Math.max(across, frame.top - box.top, box.bottom - frame.bottom);
      if (out > 1) faults.push(`cut off: ${texts[i].textContent} by ${out.toFixed(1)}`);
      for (let j = 0; j < i; j++) {
        const across = Math.min(box.right, boxes[j].right) - Math.max(box.left, boxes[j].left);
        const down = Math.min(box.bottom, boxes[j].bottom) - Math.max(box.top, boxes[j].top);
        if (across > 1 && down > 3) faults.push(`overlap: ${texts[j].textContent} | ${texts[i].textContent}`);
      }
    });
  }
  const page = document.documentElement, sideways = page.scrollWidth - innerWidth;
  opened.forEach(folded => folded.open = false);
  return {faults, sideways, height: page.scrollHeight, background: getComputedStyle(document.body).backgroundColor};
})()
"""


class Browser:
    """A headless browser of its own, with one page. events: messages of the browser that answer no command."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="kvblocks-browser-", ignore_cleanup_errors=True)
        reads_from, self._commands = os.pipe()
        answers, writes_to = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        # The browser reads descriptor 3 and writes 4. The shell connects our pipes to them.
        shell = ["/bin/sh", "-c", f'exec "$@" 3<&{reads_from} 4>&{writes_to}', "sh"]
        self._process = subprocess.Popen(
            [*shell, program, *options, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(reads_from, writes_to),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads_from)
        os.close(writes_to)
        self._answers = os.fdopen(answers, "rb")
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        pages = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in pages if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._commands)
        self._answers.close()
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the browser's answer to a command of the protocol. Raises RuntimeError when it has none."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self._number:
            self.events.append(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return dict(message["result"])

    def wait_for(self, event: str) -> None:
        """Read until the browser sends an event."""
        while not any(message.get("method") == event for message in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            message += byte
        return dict(json.loads(message))


def find_browser() -> str | None:
    """Return the path of a Chromium, None if there is none."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


def look(browser: Browser, address: str, width: int, scheme: str) -> dict[str, Any]:
    """Open a page at a width and in a colour scheme, and return what there is to see."""
    is_phone = width < 600
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=844 if is_phone else 900,
        deviceScaleFactor=1,
        mobile=is_phone,
    )
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.events.clear()
    browser.call("Page.navigate", url=address)
    browser.wait_for("Page.loadEventFired")
    seen = dict(browser.call("Runtime.evaluate", expression=FIND_FAULTS, returnByValue=True)["result"]["value"])
    methods = [(event.get("method"), event.get("params", {})) for event in browser.events]
    requested = [told["request"]["url"] for method, told in methods if method == "Network.requestWillBeSent"]
    errors = [told["exceptionDetails"]["text"] for method, told in methods if method == "Runtime.exceptionThrown"]
    errors += [str(told["args"]) for method, told in methods if method == "Runtime.consoleAPICalled"]
    errors += [told["entry"]["text"] for method, told in methods if method == "Log.entryAdded"]
    return {
        "width": width,
        "scheme": scheme,
        "errors": errors,
        "requests": [u for u in requested if u != address],
    } | seen


def take_picture(browser: Browser, path: Path, width: int, height: int) -> None:
    """Write the top of the page that is open, `height` pixels of it, as a PNG."""
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    shot = browser.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    path.write_bytes(base64.b64decode(shot["data"]))


def main() -> None:
    """Look at a report at each width and in each scheme."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write a screenshot of each view")
    parser.add_argument("--top", type=int, metavar="PIXELS", help="height of the screenshots, from the top of the page")
    parser.add_argument("--json", action="store_true", help="print a JSON list of the views")
    options = parser.parse_args()
    program = find_browser()
    if program is None:
        sys.exit(f"expected one of {', '.join(NAMES)} on the path, found none")
    views = []
    with Browser(program) as browser:
        for width in WIDTHS:
            for scheme in SCHEMES:
                view = look(browser, options.report.resolve().as_uri(), width, scheme)
                views.append(view)
                if options.pictures is not None:
                    options.pictures.mkdir(parents=True, exist_ok=True)
                    path = options.pictures / f"{options.report.stem}-{width}-{scheme}.png"
                    take_picture(browser, path, width, min(view["height"], options.top or view["height"]))
    if options.json:
        print(json.dumps(views))
    else:
        for view in views:
            print(*[f"{name}: {value}" for name, value in view.items()], sep="  ")
    sys.exit(any(view["errors"] or view["requests"] or view["faults"] or view["sideways"] > 0 for view in views))


if __name__ == "__main__":
    main()
