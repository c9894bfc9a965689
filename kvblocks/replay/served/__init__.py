"""Traces on a server that takes time, before which a session gate or a cap may stand: `kvblocks replay --gate`."""
