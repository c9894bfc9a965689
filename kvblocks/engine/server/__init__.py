"""The HTTP server over the reference engine: OpenAI's API, and what is asked about the cache.

One thread owns the engine (`engine_thread`); asyncio owns connections, time limits and bounds (`service`), and the two
talk through queues.

A body becomes an `AnswerRequest`, and that gets an `Answer`. The engine makes a `Generation` for each of its choices,
which the scheduler sees as a `Request`; a step gives it a `Piece`, and these come back to the answer and are sent.
"""
