"""Images, played before a server of ours."""

import json
from contextlib import contextmanager

from verify.proxy import Played

from kvblocks.verify.server.prompts import Words, text


class PlayedImages(Played):
    """An image becomes words that stand before the prompt: as many for each image.

    is_stale: a fault, the words are those of the image that was first shown with this prompt and salt: its KV is found
    by the places that images take, whatever is in them.
    """

    def __init__(self, *, is_stale=False):
        self.is_stale = is_stale
        self.first = {}

    @contextmanager
    def translated(self, path, body):
        for message in body.get("messages", ()):
            if isinstance(message["content"], list):
                shown, said = message["content"]
                image = shown["image_url"]["url"]
                assert image.startswith("data:image/png;base64,")
                if self.is_stale:
                    image = self.first.setdefault(json.dumps([body.get("cache_salt"), said["text"]]), image)
                message["content"] = f"{text(Words(image).draw(20))} {said['text']}"
        yield path, body
