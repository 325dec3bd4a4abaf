"""Which ranks train a model, and what this version cannot do on several."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zinf_compile.ir.config import Config
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.runtime.device.device import Device
from zinf_compile.runtime.ranks.ranks import ALONE, Ranks, TensorRanks, is_grouped


def find_ranks(mesh: DeviceMesh | None, divided: Sequence[DeviceMesh] = ()) -> Ranks:
    """Return the ranks of a mesh; without one those of the default process group, or this process alone.

    The ranks of each mesh of ``divided`` have other parts of parameters.
    """
    if mesh is None:
        if not is_grouped():
            return ALONE
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if mesh.ndim > 2:
        names = f" ({', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
        raise ConfigError(
            f"mesh has {mesh.ndim} dimensions{names}; this version takes a mesh of one, whose ranks have a shard each, or "
            "of two, (replicate, shard): give two dimensions of it, such as mesh['replicate', 'shard']"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.tolist()}; call optimize() on its ranks only"
        )
    if mesh.size() == 1:
        return find_alone(divided)
    if any((mesh.mesh.diff(dim=dim) < 0).any() for dim in range(mesh.ndim)):
        raise ConfigError(
            f"mesh has its ranks in the order {mesh.mesh.tolist()}, and torch.distributed sorts the ranks of a group; give "
            "a mesh whose ranks ascend along each dimension"
        )
    return Ranks(mesh, beside=[*map(TensorRanks, divided)])


def find_alone(divided: Sequence[DeviceMesh]) -> Ranks:
    """Return this process, which shares no row of a parameter, beside the ranks that have other parts of parameters."""
    return Ranks(beside=[*map(TensorRanks, divided)]) if divided else ALONE


def folder_of_rank(nvme: object, ranks: Ranks) -> object:
    """Return the folder of this rank, where its path names the rank: "/nvme{local_rank}"."""
    if not isinstance(nvme, str | os.PathLike):
        return nvme
    local = os.environ.get("LOCAL_RANK", str(ranks.mesh_rank))
    return os.fspath(nvme).replace("{local_rank}", local).replace("{rank}", str(ranks.mesh_rank))


def check_for_ranks(config: Config, parameters: Mapping[str, Tensor]) -> Config:
    """Return the options for several ranks. ConfigError or UnsupportedError for what this version cannot do on them."""
    if config.stage < 3 and (config.tiles or config.tile_memory is not None):
        raise ConfigError(
            f"tiles and tile_memory divide what is gathered, and stage={config.stage} keeps all of it on the device; leave "
            "them out, or say stage=3"
        )
    for name, parameter in parameters.items():
        if parameter.dim() == 0:
            raise UnsupportedError(
                f"'{name}' has no dimension that ranks could divide; make it a parameter of one element, of shape (1,)"
            )
    return config if config.stage == 3 else replace(config, tiles=None)


def refuse_shared_devices(ranks: Ranks, device: Device) -> None:
    """Raise ConfigError, on every rank, if ranks share a GPU, or cannot exchange what is there and in host memory."""
    kinds = {"cpu": torch.device("cpu"), device.torch_device.type: device.torch_device}
    missing = [kind for kind, each in kinds.items() if ranks.backend_of(each) is None]
    if missing:
        raise ConfigError(
            f"the default process group moves no tensors of {' and '.join(missing)}, and ranks exchange both what is on "
            'their device and what is in host memory; say init_process_group("cpu:gloo,cuda:nccl"), or leave the backend out'
        )
    if ranks.backend_of(device.torch_device) != "nccl":  # which takes one rank on each GPU
        return
    everywhere = ranks.exchange("devices", (os.uname().nodename, device.identity))
    for rank, each in enumerate(everywhere):
        if (first := everywhere.index(each)) < rank:
            raise ConfigError(
                f"ranks {first} and {rank} both compute on the GPU {each[1]} of {each[0]}, and NCCL takes one rank on each; "
                'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before optimize(), or pass device="cuda:<number>"'
            )
