"""Typed configuration that builds adapters."""
