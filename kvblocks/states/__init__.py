"""Recurrent states in a manager: `slots` extends the slots of groups, and `calls` is `manager.states`.

What pools, tables and lookups have to know of states is in `groups.states`.
"""
