"""A part of a program in a process of its own, whose death the program outlives. Knows nothing of models.

It keeps crashes apart and is no sandbox: the process may do all that the program may.
"""

from pykv.isolation.codec import Elsewhere, Ref, Remote
from pykv.isolation.link import Link
from pykv.isolation.process import is_possible
from pykv.isolation.serve import Service

__all__ = ["Elsewhere", "Link", "Ref", "Remote", "Service", "is_possible"]
