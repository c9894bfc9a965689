"""Parts of answers in OpenAI's forms: log probabilities and echoes."""
