"""Helpers of the tests of integrations, imported by name."""
