"""kvblocks as the cache of transformers' continuous batching.

    from kvblocks.integrations.transformers import install

    install()  # from then on model.generate_batch(...) and all other continuous batching use kvblocks

docs/integrations/transformers.md says what is served, what is refused, and how it was tested.
"""

from kvblocks.integrations.transformers.probe import check_transformers

check_transformers()  # before imports of transformers' names that may be missing

from kvblocks.integrations.transformers.install import KVBlocksPagedCache, install, uninstall  # noqa: E402

__all__ = ["KVBlocksPagedCache", "install", "uninstall"]
