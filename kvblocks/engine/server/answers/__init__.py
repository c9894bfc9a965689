"""How answers look: log probabilities and echoes, in OpenAI's forms."""
