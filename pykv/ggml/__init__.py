"""Python objects over ggml: devices, buffers, arenas, tensors, graphs, the scheduler. No C data leaves this package."""

from pykv.ggml import log_bridge as _log_bridge  # noqa: F401  (installs itself)
from pykv.ggml.arena import Arena
from pykv.ggml.backend import Backend, CancelFlag, usable_cores
from pykv.ggml.buffer import Buffer, BufferType
from pykv.ggml.device import Device, cpu_device, devices, find_device
from pykv.ggml.features import DeviceFeatures, device_features
from pykv.ggml.graph import Graph
from pykv.ggml.graph_input import GraphInput, GraphOutput
from pykv.ggml.interrupt import HeldInterrupt
from pykv.ggml.limits import takes_pieces
from pykv.ggml.ops import RopeParams
from pykv.ggml.repacking import can_repack
from pykv.ggml.rpc import connect_rpc, is_remote, remote_devices
from pykv.ggml.rpc_server import RPCServer
from pykv.ggml.sched import Sched
from pykv.ggml.stored_ops import MisplacedOp
from pykv.ggml.tensor import Tensor
from pykv.ggml.types import DType, from_float, to_float

__all__ = [
    "Arena",
    "Backend",
    "Buffer",
    "BufferType",
    "CancelFlag",
    "DType",
    "Device",
    "DeviceFeatures",
    "Graph",
    "GraphInput",
    "GraphOutput",
    "HeldInterrupt",
    "MisplacedOp",
    "RPCServer",
    "RopeParams",
    "Sched",
    "Tensor",
    "can_repack",
    "connect_rpc",
    "cpu_device",
    "device_features",
    "devices",
    "find_device",
    "from_float",
    "is_remote",
    "remote_devices",
    "takes_pieces",
    "to_float",
    "usable_cores",
]
