"""mlx-lm's prompt cache over blocks that all prompts share. docs/integrations/mlx-lm.md says what it gains."""

from kvblocks.integrations.mlx_lm.prompt_cache import BlockPromptCache

__all__ = ["BlockPromptCache"]
