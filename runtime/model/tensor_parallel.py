"""Parameters that the user has distributed as DTensors, as tensor parallelism does: of each, the local tensor is stored.

``parallelize_module`` divides parameters over one dimension of a mesh; ranks of another dimension train together, and share
the local tensors that are the same on all of them::

    mesh ("dp", "tp")  [[0, 1],     ranks 0 and 2 have the same local tensors, and divide their rows among them
                        [2, 3]]     ranks 1 and 3 have the other ones
"""

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter

from zinf_compile.ir.config import Config
from zinf_compile.ir.errors import ConfigError, UnsupportedError
from zinf_compile.runtime.params.records import StoredParameter, mark_local, record_of
from zinf_compile.runtime.ranks.find_ranks import find_alone, find_ranks
from zinf_compile.runtime.ranks.ranks import Ranks, describe_ranks, is_grouped

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def find_distributed(parameters: Mapping[str, Parameter]) -> dict[str, "DTensor"]:
    """Return the parameters that are DTensors, and in no store yet."""
    module = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it
    if module is None:
        return {}
    found = {name: each for name, each in parameters.items() if isinstance(each, module.DTensor)}
    return {name: each for name, each in found.items() if record_of(each) is None}


def refuse_fully_sharded(model: Module) -> None:
    """Raise UnsupportedError for a model of which FSDP2 has made DTensors: it gathers and reduces them itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever has used it has imported it
    if fsdp is None:
        return
    for path, module in model.named_modules():
        if isinstance(module, fsdp.FSDPModule):
            raise UnsupportedError(
                f"{path or 'the model'} was given to fully_shard, which divides its parameters among ranks, as "
                "optimize() does; leave fully_shard out, and give its mesh to optimize(model, mesh=mesh)"
            )


def find_data_ranks(mesh: DeviceMesh | None, distributed: Mapping[str, "DTensor"]) -> Ranks:
    """Return the ranks that train a model with such parameters together: those of a mesh, beside the ones of a DTensor.

    Without a mesh every rank of the default group has to have a part of each DTensor: then each stores its own parts.
    ConfigError for meshes that overlap, or do not belong together, and for a mesh that is missing.
    """
    if mesh is None and distributed and is_grouped():
        world = dist.get_world_size()
        for name, parameter in distributed.items():
            if (size := parameter.device_mesh.size()) < world:
                raise ConfigError(
                    f"'{name}' is a DTensor over {size} of {world} ranks; say which ranks have the same parts of it and "
                    "train together, such as optimize(model, mesh=mesh['dp'])"
                )
        return find_alone(_meshes_of(distributed))
    if mesh is not None and mesh.size() > 1 and mesh.get_coordinate() is not None:
        check_meshes(mesh, distributed)
    return find_ranks(mesh, _meshes_of(distributed))


def may_capture(ranks: Ranks, distributed: Mapping[str, "DTensor"]) -> bool:
    """Return whether all ranks among which parameters are distributed learn of each other's graphs."""
    known = [each.members for each in ranks.beside]
    return all(sorted(mesh.mesh.flatten().tolist()) in known for mesh in _meshes_of(distributed))


def _meshes_of(distributed: Mapping[str, "DTensor"]) -> list[DeviceMesh]:
    """Return the meshes of several ranks over which parameters are distributed, each set of ranks once."""
    meshes = (parameter.device_mesh for parameter in distributed.values() if parameter.device_mesh.size() > 1)
    return [*{frozenset(mesh.mesh.flatten().tolist()): mesh for mesh in meshes}.values()]


def check_meshes(mesh: DeviceMesh | None, distributed: Mapping[str, "DTensor"]) -> None:
    """Raise ConfigError if the ranks of a mesh cannot train a model with such parameters together."""
    if mesh is not None:
        for name, parameter in distributed.items():
            _check_mesh(name, parameter.device_mesh, mesh)


def _check_mesh(name: str, own: DeviceMesh, mesh: DeviceMesh) -> None:
    both = sorted({*own.mesh.flatten().tolist()} & {*mesh.mesh.flatten().tolist()})
    if both != [dist.get_rank()]:
        raise ConfigError(
            f"{describe_ranks(both)} are both in the mesh that is given, {mesh.mesh.tolist()}, and in that of '{name}', "
            f"{own.mesh.tolist()}, which divides it among them; give the dimension of the mesh along which parameters are "
            "the same, such as optimize(model, mesh=mesh['dp'])"
        )
    if not _belong_together(mesh, own):
        raise ConfigError(
            f"the mesh that is given, {mesh}, and that of '{name}', {own}, are not dimensions of one mesh; make one, as "
            "init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp')), parallelize over mesh['tp'], and give mesh['dp']"
        )


def _belong_together(mesh: DeviceMesh, own: DeviceMesh) -> bool:
    """Return whether two meshes are dimensions of one, which torch can make of them."""
    if mesh.mesh_dim_names is None or own.mesh_dim_names is None:
        return False
    try:
        DeviceMesh._concatenate([mesh, own])
    except RuntimeError:
        return False
    return True


def check_distributed(distributed: Mapping[str, "DTensor"], config: Config, *, has_init: bool) -> None:
    """Raise UnsupportedError or ConfigError for DTensors whose local tensors cannot be stored, and options beside them."""
    if not distributed:
        return
    from torch.distributed.tensor import Replicate, Shard  # it was imported: see find_distributed
    from torch.distributed.tensor.placement_types import _StridedShard

    from zinf_compile.runtime.params.shard_views import describe_placements

    for name, parameter in distributed.items():
        odd = [each for each in parameter.placements if not isinstance(each, Replicate | Shard | _StridedShard)]
        if odd:
            raise UnsupportedError(
                f"'{name}' is a DTensor with {describe_placements(parameter._spec)}: with {odd[0]!r} its values cannot be "
                "gathered from what ranks have; redistribute it to Shard or Replicate before optimize()"
            )
        local = parameter._local_tensor
        if type(local) is not Tensor or local.layout is not torch.strided:
            raise UnsupportedError(
                f"'{name}' is a DTensor whose local tensor is a {type(local).__name__} ({local.layout}), and a store takes "
                "plain ones; distribute a plain parameter"
            )
        if local.dim() == 0 or any(map(_leaves_some_empty, parameter.shape, parameter._spec.num_shards_map)):
            raise UnsupportedError(
                f"'{name}' is a DTensor of {tuple(parameter.shape)} with {describe_placements(parameter._spec)}, and some "
                "ranks have no element that could be stored; distribute it over fewer ranks, or leave it plain"
            )
    if has_init:
        raise UnsupportedError(
            f"init gives values to plain parameters, and '{next(iter(distributed))}' is a DTensor; give it its values "
            "before optimize(), and leave init out"
        )
    if config.state_dtype is not None:
        raise UnsupportedError(
            f"state_dtype='{config.state_dtype}' encodes the state of whole rows, and a rank has parts of those of a "
            f"DTensor, such as '{next(iter(distributed))}'; leave it out, which keeps states exact"
        )
    if config.frozen_dtype is not None:
        raise UnsupportedError(
            f"frozen_dtype='{config.frozen_dtype}' encodes whole rows, and a rank has parts of those of a DTensor, such as "
            f"'{next(iter(distributed))}'; leave it out"
        )
    captured = {
        "micro_batches": config.micro_batches if config.micro_batches != 1 else None,
        "tiles": config.tiles or None,
        "tile_memory": config.tile_memory,
    }
    if given := [name for name, value in captured.items() if value is not None]:
        raise UnsupportedError(
            f"{given[0]} cuts a captured graph, and that of a model with DTensors, such as '{next(iter(distributed))}', "
            f"cannot be cut yet; leave {given[0]} out"
        )


def _leaves_some_empty(length: int, num_shards: int) -> bool:
    """Return whether some shards of a dimension have nothing, where all but the last ones are of one length."""
    return -(-length // max(1, -(-length // num_shards))) < num_shards


def refuse_distributed(records: Iterable[StoredParameter], what: str) -> None:
    """Raise UnsupportedError if a parameter that ``what`` needs whole is stored as the local tensor of a DTensor."""
    for record in records:
        if (distribution := record.views.distribution) is not None:
            raise UnsupportedError(
                f"{what} needs whole parameters, and each rank stores the local tensor of '{record.name}', a DTensor "
                f"({distribution}); use full_tensor(), or torch.distributed.checkpoint with the state_dict() of the model"
            )


def with_locals(parameters: Mapping[str, Parameter], distributed: Mapping[str, "DTensor"]) -> dict[str, Parameter]:
    """Return the parameters with plain ones over the local tensors in the place of DTensors, to which they lead."""
    taken = dict(parameters)
    for name, parameter in distributed.items():
        taken[name] = local = Parameter(parameter._local_tensor.detach(), parameter.requires_grad)
        mark_local(local, parameters[name])
    return taken
