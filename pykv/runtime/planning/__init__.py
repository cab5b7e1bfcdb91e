"""What a model and a context take, before anything of it is allocated: `plan`."""

from pykv.runtime.planning.needs import DeviceNeeds, Plan, Suggestion
from pykv.runtime.planning.planner import plan

__all__ = ["DeviceNeeds", "Plan", "Suggestion", "plan"]
