"""Who is let in, and how much of theirs is worked on at once: what stands between the network and the service.

`connections` bounds connections, `gate` decides by a request's headers who may ask what, `bodies` reads and parses
what they send, `encoding` turns texts into tokens. Each has its own bound, so that nobody's request stops others'.
"""
