"""A real Chromium for tests, driven by chromedriver over W3C's WebDriver protocol; tests skip where they aren't."""

import base64
import json
import shutil
import subprocess
import time
from contextlib import contextmanager

import httpx2

from bench.ports import free_ports

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
MISSING = (
    None
    if CHROMIUM and DRIVER
    else "needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
)


class Browser:
    """One window. Scripts return JSON values."""

    def __init__(self, http, session):
        self._http = http
        self._path = f"/session/{session}"

    def _ask(self, method, path, body=None):
        response = self._http.request(method, self._path + path, json=body if method == "POST" else None)
        value = response.json()["value"]
        assert response.status_code == 200, value
        return value

    def _developer(self, command, **values):
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": values})

    def open(self, url):
        self._ask("POST", "/url", {"url": url})

    def resize(self, width, height):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._developer("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._developer("Emulation.setEmulatedMedia", features=features)

    def run(self, script, *arguments):
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, script, seconds=30):
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"it did not become so: {script}"
            time.sleep(0.05)
        return found

    def text(self, element_id):
        return self.run("return document.getElementById(arguments[0]).textContent", element_id)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def said(self):
        """Return the console's messages since the last call."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def requested(self):
        """Return the addresses that were requested since the last call."""
        events = [
            json.loads(entry["message"])["message"] for entry in self._ask("POST", "/se/log", {"type": "performance"})
        ]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


@contextmanager
def browser():
    """A headless browser with a profile of its own."""
    (port,) = free_ports(1)
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            end = time.monotonic() + 30
            while True:
                try:
                    http.get("/status")
                    break
                except httpx2.TransportError:
                    assert time.monotonic() < end
                    time.sleep(0.1)
            arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"]
            options = {"binary": CHROMIUM, "args": arguments}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
            made = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in made, made
            yield Browser(http, made["sessionId"])
            http.delete(f"/session/{made['sessionId']}")
    finally:
        driver.terminate()
        driver.wait(30)
