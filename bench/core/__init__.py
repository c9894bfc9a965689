"""Block management: every call compared with the peers', and with earlier versions."""
