"""The cache types by name."""


class Types:
    def __init__(self):
        self._registry = {}

    def register(self, name):
        if name in self._registry:
            raise KeyError(name)
        return lambda maker: self._registry.update({name: maker})

    def __getitem__(self, name):
        return self._registry[name]

    def supported_names(self):
        return [*self._registry]


SUPPORTED_CACHE_MANAGER = Types()


def create_prefix_cache(device, type):  # noqa: A002  # mini-sglang's name
    return SUPPORTED_CACHE_MANAGER[type](device)
