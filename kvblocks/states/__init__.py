"""Recurrent states in a manager: `slots` extends the slots of groups, and `calls` is `manager.states`.

What pools, tables and lookups have to know about states is in `groups.states`.
"""
