"""examples/deploy: the command lines of the compose file and of the unit serve, and all series that are named exist."""

import re
import shlex
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import yaml
from server.server_harness import series, serving_as, wait_until_stored
from tiers.store import servers

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
SMALLER = {"4GiB": "4MiB", "8GiB": "8MiB", "100GB": "64MB"}
PROMPT = [(7 * index) % 250 for index in range(300)]


@pytest.fixture
def secrets(tmp_path):
    folder = tmp_path / "secrets"
    subprocess.run(["sh", DEPLOY / "make_secrets.sh", folder], check=True)
    return folder


def compose_command():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["kvblocks"]["command"]


def unit_command():
    unit = (DEPLOY / "kvblocks.service").read_text().replace("\\\n", " ")
    return shlex.split(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1])[1:]


def here(command, places):
    """The options of a command line, with places and sizes of this test, one thread and a free port."""
    assert command[0] == "serve"
    text = "\n".join(command[1:])
    for name, place in {**places, **SMALLER}.items():
        assert name in text, f"expected {name!r} in the command line, got {command}"
        text = text.replace(name, str(place))
    return [*text.split("\n"), "--port", "0", "--threads", "1"]


@contextmanager
def until_sigterm(options):
    """A server's URL. At the end it is told to stop, and does so with status 0."""
    with serving_as(*options) as (process, url, lines):
        yield url.removesuffix("/v1"), lines
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, lines


def ask(url, secrets):
    """One answer over HTTP. Returns how many of the prompt's tokens were cached, by where they were."""
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    key = re.search(r'key = "(.*)"', (secrets / "keys.toml").read_text())[1]
    with httpx2.Client(base_url=url, timeout=60, trust_env=False) as http:
        assert http.post("/v1/completions", json=body).status_code == 401
        response = http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "served"
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]


def named_series(path):
    """The series that a page or a file of rules names."""
    return set(re.findall(r"\bkvblocks_[a-z_]+", path.read_text(encoding="utf-8")))


def valkey_options(users):
    """valkey.conf, as options of a command line."""
    lines = [shlex.split(line) for line in (DEPLOY / "valkey.conf").read_text().splitlines() if line[0] != "#"]
    assert ["aclfile", "/run/secrets/store-users"] in lines
    options = [(f"--{name}", *values) for name, *values in lines if name != "aclfile"]
    return [word for option in options for word in option] + ["--aclfile", str(users)]


def test_what_compose_starts_answers_finds_its_disk_again_and_has_all_series(roomy_folder, secrets, tmp_path):
    pytest.importorskip("valkey")
    with servers.running(tmp_path / "valkey", *valkey_options(secrets / "store-users.acl")) as store:
        places = {
            "/model": roomy_folder,
            "/run/secrets/keys": secrets / "keys.toml",
            "/run/secrets": secrets,
            "/cache": tmp_path / "volume",
            "valkey:6379": f"127.0.0.1:{store.port}",
            "0.0.0.0": "127.0.0.1",
        }
        options = here(compose_command(), places)
        with until_sigterm(options) as (url, lines):
            assert set(ask(url, secrets).values()) == {0}
            wait_until_stored(url, "disk")
            wait_until_stored(url, "store")
            found = {name.partition("{")[0] for name in series(url)}
            assert "warn" not in "".join(lines).lower()
        with until_sigterm(options) as (url, _):
            assert ask(url, secrets)["disk"] == 288
    for path in (ROOT / "docs" / "tiers.md", ROOT / "docs" / "store.md", DEPLOY / "alerts.yaml"):
        assert len(named_series(path)) > 5
        assert named_series(path) <= found, path


def test_what_the_unit_starts_answers(roomy_folder, secrets, tmp_path):
    places = {"/srv/kvblocks/model": roomy_folder, "/etc/kvblocks": secrets, "/var/cache/kvblocks": tmp_path}
    with until_sigterm(here(unit_command(), places)) as (url, _):
        assert ask(url, secrets) == {"device": 0, "host": 0, "disk": 0}
        assert ask(url, secrets)["device"] == 288


def test_the_stores_user_has_the_rights_that_the_page_lists(secrets):
    page = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")
    listed = re.search(r"^ACL SETUSER kvblocks on >PASSWORD (.*)$", page, re.MULTILINE)[1]
    assert (secrets / "store-users.acl").read_text().splitlines()[1].split()[4:] == listed.split()
