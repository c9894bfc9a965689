"""Fetches the sources of a package's version and unpacks them, without building anything.

    python tools/fetch_sdist.py vllm==0.32.0 FOLDER

It writes FOLDER/vllm-0.32.0. `pip download` would build the package to read its metadata, so this only uses the parts
of pip that find and transfer a file. Index, proxy, certificates and credentials are pip's.
"""

import hashlib
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from pip._internal.commands.download import DownloadCommand
from pip._vendor.packaging.requirements import Requirement

PIECE_BYTES = 1 << 20


class FetchCommand(DownloadCommand):  # type: ignore[misc]
    """`pip download` that only transfers the file."""

    def run(self, options: Any, args: list[str]) -> int:
        """Fetch what is asked for; args: a requirement and a folder. Return the exit status."""
        asked, folder = Requirement(args[0]), Path(args[1])
        with self.get_default_session(options) as session:
            finder = self._build_package_finder(options, session)
            found = finder.find_best_candidate(asked.name, asked.specifier).best_candidate
            if found is None:
                print(f"fetch_sdist: no index has the sources of {asked}", file=sys.stderr)
                return 1
            with tempfile.TemporaryDirectory(prefix="kvblocks-sdist-") as scratch:
                archive = Path(scratch) / found.link.filename
                download(session, found.link, archive)
                unpack(archive, folder, f"{asked.name}-{found.version}")
        return 0


def download(session: Any, link: Any, archive: Path) -> None:
    """Write the file behind `link` to `archive`. Raises RuntimeError if its digest is not the index's."""
    digest = hashlib.new(link.hash_name) if link.hash_name else None
    with session.get(link.url_without_fragment, stream=True) as answer, archive.open("wb") as file:
        answer.raise_for_status()
        for piece in answer.iter_content(PIECE_BYTES):
            file.write(piece)
            if digest is not None:
                digest.update(piece)
    if digest is not None and digest.hexdigest() != link.hash:
        raise RuntimeError(f"{link.filename}: expected the {link.hash_name} {link.hash}, got {digest.hexdigest()}")


def unpack(archive: Path, folder: Path, name: str) -> None:
    """Unpack `archive` to folder/name, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
        (top,) = Path(scratch).iterdir()
        shutil.rmtree(folder / name, ignore_errors=True)
        top.rename(folder / name)


if __name__ == "__main__":
    sys.exit(FetchCommand("download", "").main(["--no-deps", "--no-binary", ":all:", *sys.argv[1:]]))
