"""Logging: one logger a package, all below ``pykv``; silent until the program configures logging."""

from __future__ import annotations

import logging

logging.getLogger("pykv").addHandler(logging.NullHandler())


def logger(name: str) -> logging.Logger:
    """Return the logger of a pykv module; pass ``__name__``."""
    return logging.getLogger(name)
