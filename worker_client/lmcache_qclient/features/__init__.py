"""Kinds of intermediate tensors.

The connector knows one dispatcher; the dispatcher knows features; a feature knows its tensors.
"""
