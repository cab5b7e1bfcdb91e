"""A trace run again, as it was and otherwise, up to the first difference."""

from pykv.runtime.replay.run import Report, replay
from pykv.runtime.replay.setup import Changes

__all__ = ["Changes", "Report", "replay"]
