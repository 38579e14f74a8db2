"""Helpers for tests: the real daemon, and a bare client to talk to it."""
