"""Model families: hyperparameters, weights, and the graph of each, one file per family."""

from pykv.models.architecture import Architecture
from pykv.models.graph_builder import GraphBuilder, GraphShape
from pykv.models.hparams import HParams
from pykv.models.keys import Keys
from pykv.models.placement import Placement, TensorRule
from pykv.models.registry import ARCHITECTURES, build_architecture, find_architecture
from pykv.models.rope import ContextRope, RopeRequest, derive_rope
from pykv.models.weights import Weights

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "ContextRope",
    "GraphBuilder",
    "GraphShape",
    "HParams",
    "Keys",
    "Placement",
    "RopeRequest",
    "TensorRule",
    "Weights",
    "build_architecture",
    "derive_rope",
    "find_architecture",
]
