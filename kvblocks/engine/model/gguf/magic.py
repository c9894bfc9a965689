"""Recognizes GGUF files, without importing the gguf package: loading a folder shouldn't wait for it."""

from pathlib import Path

_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, by its name or its first bytes (Ollama names its files by their digests)."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
