"""Running models: model, context, tokeniser, samplers."""

from pykv.runtime.context import Context
from pykv.runtime.model import Model
from pykv.runtime.params import ContextParams

__all__ = ["Context", "ContextParams", "Model"]
