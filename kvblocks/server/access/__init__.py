"""Access to the service: who may send which requests, and how much is processed at once.

`connections` bounds connections, `gate` checks a request's headers and rights, `bodies` reads and parses bodies,
`encoding` turns texts into tokens, and `compiling` turns forms of answers into grammars. Each has a limit of its own,
so that one client's requests can't block those of others.
"""
