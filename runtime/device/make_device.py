"""Creates devices from their names."""

import torch

from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.cuda import CudaDevice
from zinf_compile.runtime.device.device import Device


def make_device(name: str) -> Device:
    """Return the device with this name, as torch writes it. ConfigError if there is no such device."""
    return CPU if torch.device(name).type == "cpu" else CudaDevice(name)


def free_device_memory(name: str) -> int:
    """Return the free bytes of a device. ConfigError if there is no such device."""
    return make_device(name).free_nbytes
