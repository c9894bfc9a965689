"""As in transformers."""


def resolve_continuous_batching_config(config):
    return config
