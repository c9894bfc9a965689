"""Write a new version into the tree: `python tools/release.py 0.3.0`, which `make release` runs (docs/releasing.md).

The version goes into kvblocks/version.py. In CHANGELOG.md the section *Unreleased* gets the version and the date, and a
new, empty one is put above it. Nothing is written if the section lacks a summary or the version isn't higher than the
last one.
"""

import argparse
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = "## [Unreleased]\n"


def numbers(version: str) -> tuple[int, ...]:
    """Return a version's three numbers. Raises ValueError for anything else."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"expected a version such as 0.3.0, got {version!r}")
    return tuple(map(int, version.split(".")))


def released(changelog: str, version: str, day: str) -> str:
    """Return the changelog with the section *Unreleased* turned into that of `version`. Raises ValueError."""
    if changelog.count(HEADING) != 1:
        raise ValueError(f"CHANGELOG.md: expected one heading {HEADING.strip()!r}, got {changelog.count(HEADING)}")
    section = changelog.partition(HEADING)[2].partition("\n## ")[0]
    if "\n- " not in section.partition("\n### ")[0]:
        raise ValueError("CHANGELOG.md: expected a summary as a list below Unreleased, before its first part, got none")
    return changelog.replace(HEADING, f"{HEADING}\n## [{version}] - {day}\n")


def main() -> int:
    """Write the version into both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="the new version, such as 0.3.0")
    parser.add_argument("--day", default=f"{datetime.now(UTC):%Y-%m-%d}", help="default: today, in UTC")
    asked = parser.parse_args()
    source, changelog = ROOT / "kvblocks" / "version.py", ROOT / "CHANGELOG.md"
    text = source.read_text(encoding="utf-8")
    old = text.split('"')[-2]
    try:
        if numbers(asked.version) <= numbers(old):
            parser.error(f"expected a version above {old}, got {asked.version}")
        made = released(changelog.read_text(encoding="utf-8"), asked.version, asked.day)
    except ValueError as error:
        parser.error(str(error))
    source.write_text(text.replace(f'"{old}"', f'"{asked.version}"'), encoding="utf-8")
    changelog.write_text(made, encoding="utf-8")
    print(f"{old} -> {asked.version}, of {asked.day}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
