"""The HTTP server over the reference engine: OpenAI's API, and endpoints of the cache.

One thread owns the engine (`engine_thread`). The event loop owns connections, time limits and bounds (`service`). The
two threads talk through queues.

A body becomes an `AnswerRequest`, which gets an `Answer`. The engine makes a `Generation` for each choice; the
scheduler sees it as a `Request`. Each step adds a `Piece` to the generation. Pieces go to the answer, and are sent.
"""
