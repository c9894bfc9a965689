"""`python -m kvblocks.integrations.mlx_lm`: mlx-lm's own server with a `BlockPromptCache`.

It takes all options of `mlx_lm.server`, and some of its own: `--help` shows both.
"""

import argparse
import sys
from typing import Any

from kvblocks import KVBlocksError


def main(arguments: list[str] | None = None) -> None:
    """Start the server. Returns when it ends."""
    from mlx_lm import server

    from kvblocks.integrations.mlx_lm.install import install

    parser = argparse.ArgumentParser("kvblocks.integrations.mlx_lm", add_help=False, allow_abbrev=False)
    parser.add_argument("--cache-bytes", type=_size, help="most bytes of cached KV (default: a quarter of the memory)")
    parser.add_argument("--cache-block-size", type=int, default=64, help="tokens of a block (default: 64)")
    parser.add_argument("--cache-folder", help="also keep cached KV in this folder, across restarts")
    parser.add_argument(
        "--cache-folder-bytes", type=_size, default=20 << 30, help="most bytes in that folder (default: 20 GiB)"
    )
    options, others = parser.parse_known_args(arguments)
    if "-h" in others or "--help" in others:
        parser.print_help()
        print()  # noqa: T201
    disk: Any = None
    if options.cache_folder is not None:
        from kvblocks.integrations.mlx_lm.disk import DiskOptions

        disk = DiskOptions(options.cache_folder, options.cache_folder_bytes)
    max_bytes = options.cache_bytes if options.cache_bytes is not None else _their_bytes(others)
    try:
        install(max_bytes=max_bytes, block_size=options.cache_block_size, disk=disk)
    except KVBlocksError as error:
        parser.error(str(error))
    sys.argv = ["mlx_lm.server", *others]
    server.main()


def _size(text: str) -> int:
    """Read a size as mlx-lm does."""
    from mlx_lm.utils import _parse_size

    try:
        return int(_parse_size(text))
    except (ArithmeticError, ValueError):
        raise argparse.ArgumentTypeError(f"expected bytes, such as 8GB, got {text!r}") from None


def _their_bytes(arguments: list[str]) -> int | None:
    """Return what mlx-lm's --prompt-cache-bytes says, which bounds the whole cache here."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--prompt-cache-bytes", type=_size)
    found: int | None = parser.parse_known_args(arguments)[0].prompt_cache_bytes
    return found


if __name__ == "__main__":
    main()
