"""Is a file a GGUF? Needs no package, so that who loads a folder waits for none."""

from pathlib import Path

_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, by its name or its first bytes. Ollama's files have digests for names."""
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
