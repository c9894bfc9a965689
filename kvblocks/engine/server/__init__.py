"""The HTTP server over the reference engine: OpenAI's API, and what is asked about the cache.

One thread owns the engine (`engine_thread`); asyncio owns connections, time limits and bounds (`service`), and the two
talk through queues. What a request means is decided without either (`fields`, `requests`), and so is how an answer
looks (`replies`).
"""
