"""Headway serves open-weight language models and knows what every token costs."""

__version__ = "0.1.0"
