"""Features of devices: what each says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from pykv._native import ffi, lib
from pykv.ggml.device import Device


@dataclass(frozen=True)
class DeviceFeatures:
    """What a device can do beside computing.

    Attributes
    ----------
    is_async : computes while the program goes on.
    has_host_buffer : has memory of the host from which it copies faster.
    wraps_host_memory : uses weights where a mapped file has them.
    has_events : another device can wait for it.
    build : what its backend was built with or found here, such as ``{"AVX2": "1"}``.
    """

    is_async: bool
    has_host_buffer: bool
    wraps_host_memory: bool
    has_events: bool
    build: dict[str, str]


def device_features(device: Device) -> DeviceFeatures:
    """Return the features of a device."""
    props = ffi.new("struct ggml_backend_dev_props *")
    lib.ggml_backend_dev_get_props(device.ptr, props)
    caps = props.caps
    is_async = getattr(caps, "async")  # the name is a word of Python's
    return DeviceFeatures(is_async, caps.host_buffer, caps.buffer_from_host_ptr, caps.events, _build(device))


def _build(device: Device) -> dict[str, str]:
    found: dict[str, str] = {}
    feature = lib.pykv_features(device.ptr)
    while feature and feature.name:
        found[ffi.string(feature.name).decode()] = ffi.string(feature.value).decode()
        feature += 1
    return found
