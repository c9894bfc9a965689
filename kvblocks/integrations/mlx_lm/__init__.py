"""mlx-lm's prompt cache over blocks that all prompts share.

    from kvblocks.integrations import mlx_lm

    mlx_lm.install()  # before a program imports LRUPromptCache; or: python -m kvblocks.integrations.mlx_lm --model …

docs/integrations/mlx-lm.md says what it gains, what is refused, and how it was tested.
"""

from kvblocks.integrations.mlx_lm.disk import DiskOptions
from kvblocks.integrations.mlx_lm.install import install, uninstall
from kvblocks.integrations.mlx_lm.prompt_cache import BlockPromptCache

__all__ = ["BlockPromptCache", "DiskOptions", "install", "uninstall"]
