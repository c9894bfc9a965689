"""kvblocks as the cache of transformers' continuous batching.

    from kvblocks.integrations.transformers import install

    install()  # then model.generate_batch(...), and all else that batches continuously, as ever

docs/integrations/transformers.md says what is served, what is refused, and how it was tested.
"""

from kvblocks.integrations.transformers.probe import check_transformers

check_transformers()  # before anything of transformers' is imported that may not be there

from kvblocks.integrations.transformers.install import KVBlocksPagedCache, install, uninstall  # noqa: E402

__all__ = ["KVBlocksPagedCache", "install", "uninstall"]
