"""What `make release` writes, and what it refuses."""

import runpy
import sys
from pathlib import Path

import pytest

import kvblocks

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\nIn short:\n\n- new\n\n### Added\n\n- a\n\n## [0.1.0]\n\n- old\n"


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / "tools" / "release.py"), run_name="release")


def test_what_is_unreleased_gets_the_version_and_the_day(script):
    made = script["released"](CHANGELOG, "0.2.0", "2026-12-01")
    assert made == CHANGELOG.replace("## [Unreleased]\n", "## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("In short:\n\n- new\n\n", "", "expected a summary"),
        ("## [Unreleased]\n", "", "expected one heading"),
        ("# Changelog\n", "## [Unreleased]\n", "expected one heading"),
    ],
)
def test_a_changelog_that_cannot_be_released_is_refused(script, old, new, said):
    with pytest.raises(ValueError, match=said):
        script["released"](CHANGELOG.replace(old, new), "0.2.0", "2026-12-01")


def test_this_changelog_has_a_place_for_what_is_unreleased(script):
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count(script["HEADING"]) == 1


@pytest.mark.parametrize("version", [kvblocks.__version__, "0.0.1", "0.3", "v99.0.0"])
def test_a_version_that_is_no_higher_one_writes_nothing(script, version, monkeypatch, capsys):
    files = [ROOT / "kvblocks" / "version.py", ROOT / "CHANGELOG.md"]
    before = [path.read_bytes() for path in files]
    monkeypatch.setattr(sys, "argv", ["release.py", version])
    with pytest.raises(SystemExit):
        script["main"]()
    assert "expected a version" in capsys.readouterr().err
    assert [path.read_bytes() for path in files] == before
