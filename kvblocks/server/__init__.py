"""The HTTP server over the reference engine: OpenAI's API, and endpoints for the cache.

One thread owns the engine (`engine_thread`). The event loop owns connections, time limits and bounds (`service`). The
two communicate through queues.

A body becomes an `AnswerRequest`, which gets an `Answer`. The engine makes a `Generation` for each choice, which the
scheduler sees as a `Request`. Each step adds a `Piece` to the generation. Pieces go to the answer, and from there to
the client.
"""
