"""What stands between the network and the service: who may send which requests, and how much is processed at once.

`connections` bounds connections, `gate` checks a request's headers and rights, `bodies` reads and parses bodies,
`encoding` turns texts into tokens, `compiling` forms into grammars. Each has its own bound, so that no client's
requests stop those of others.
"""
