"""Creates devices from their names."""

import torch

from zinf_compile.ir.config import FoundDevice
from zinf_compile.runtime.device.allocations import largest_budget
from zinf_compile.runtime.device.cpu import CPU
from zinf_compile.runtime.device.cuda import CudaDevice
from zinf_compile.runtime.device.device import Device


def make_device(name: str) -> Device:
    """Return the device with this name, as torch writes it. ConfigError if there is no such device."""
    return CPU if torch.device(name).type == "cpu" else CudaDevice(name)


def find_device(name: str) -> FoundDevice:
    """Return what budgets depend on of a device. ConfigError if there is no such device."""
    device = make_device(name)
    return FoundDevice(
        memory=device.memory,
        largest_budget=largest_budget(device.free_nbytes),
        libraries_nbytes=device.libraries_nbytes,
    )
