"""What users see of a stored parameter of which each rank has a shard: DTensors, as under FSDP2.

``state_dict()``, ``clip_grad_norm_``, ``full_tensor()``, printing and torch.distributed.checkpoint mean what they mean
for any DTensor. The local tensor is this rank's home tensor, and its values are waited for as those of any home tensor.
"""

import copy
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.coded_state import CodedHomeTensor
from zinf_compile.runtime.params.home import HomeParameter, HomeTensor, await_home, note_what_is_computed
from zinf_compile.runtime.params.home_gradient import HomeGradient
from zinf_compile.runtime.params.records import StoredParameter, distributed_of, mark_replaced, record_of
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.storage.state_codes import Paged


class _Shard(HomeTensor, DTensor):
    """A home tensor of which this rank has a shard. DTensor's own methods do not pass ``__torch_function__``."""

    def to_local(self, **kwargs: Any) -> Tensor:
        """Return this rank's shard."""
        return self._plain_shard().to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """Return the full value, gathered from all ranks. RankError if one is gone, or cannot go on after an error."""
        plain = self._plain_shard()
        with _naming_lost_ranks(self.record()):
            return plain.full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return it with other placements."""
        return self._plain_shard().redistribute(*args, **kwargs)

    def _plain_shard(self) -> DTensor:
        plain = self.plain()
        assert isinstance(plain, DTensor)
        return plain

    def _as_plain(self) -> Tensor:
        return DTensor(self._local_tensor, self._spec, requires_grad=False)


class HomeTensorShard(_Shard):
    """This rank's shard of a tensor of optimizer state."""


class CodedTensorShard(_Shard):
    """This rank's shard of a tensor of optimizer state that is stored in codes: the local tensor decodes its values."""

    _local_tensor: CodedHomeTensor

    def to_local(self, **kwargs: Any) -> Tensor:
        """Return this rank's shard, a home tensor of codes."""
        await_home(self)
        return self._local_tensor

    def _as_plain(self) -> Tensor:
        return DTensor(self._local_tensor.plain(), self._spec, requires_grad=False)


class HomeGradientShard(HomeGradient, _Shard):
    """This rank's shard of a gradient."""


class HomeParameterShard(HomeParameter, DTensor):
    """A parameter of which this rank has a shard."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See HomeParameter. What ``detach()`` returns, as for state dicts, has no offset either: see ``_dtensor``."""
        result = super().__torch_function__(func, types, args, kwargs)
        if func is Tensor.detach and result.storage_offset():
            # Not a new DTensor: this one shares the version of the parameter, by which writes to it are noticed.
            result.data = _dtensor(result._local_tensor, result._spec)
        return result

    def to_local(self, **kwargs: Any) -> Tensor:
        """Return this rank's shard, which may be written: the compute copy is then refreshed."""
        await_home(self)
        if (record := record_of(self)) is not None:
            record.copies.expose()
        local = super().to_local(**kwargs)
        note_what_is_computed(local, (self,))
        return local

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """Return the full value, gathered from all ranks. RankError if one is gone, or cannot go on after an error."""
        await_home(self)
        with _naming_lost_ranks(record_of(self)):
            value = super().full_tensor(**kwargs)
        note_what_is_computed(value, (self,))
        return value

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return it with other placements."""
        await_home(self)
        moved = super().redistribute(*args, **kwargs)
        note_what_is_computed(moved, (self,))
        return moved


def _naming_lost_ranks(record: StoredParameter | None) -> AbstractContextManager[None]:
    """Return a block in which an error of a collective becomes a RankError, which an earlier error raises at once."""
    if record is None:
        return nullcontext()
    record.store.ranks.check_together()
    return record.store.ranks.raising(f"the gather of {record.name}")


_KINDS: dict[type[Tensor], type[DTensor]] = {HomeTensor: HomeTensorShard, HomeGradient: HomeGradientShard}


class ShardViews:
    """See ``Views``. Of one parameter, as DTensors over the ranks that have a shard of it.

    Of a DTensor of the user's, as of tensor parallelism, the store has the local tensor, and divides its rows among the
    ranks of the store. Its placements come behind those of the store, as under FSDP2::

        of the user     mesh ("tp",)        [Shard(0)]                                     [Shard(1)]
        shown           mesh ("dp", "tp")   [_StridedShard(0, split_factor=tp), Shard(0)]  [Shard(0), Shard(1)]
    """

    def __init__(self, ranks: Ranks, parameter: Parameter) -> None:
        given = distributed_of(parameter)
        assert given is None or isinstance(given, DTensor)
        self._given = None if given is None else given._spec
        self._spec = _spec_of(ranks, parameter, self._given)

    @property
    def distribution(self) -> str | None:
        """See Views.distribution."""
        return None if self._given is None else describe_placements(self._given)

    def show(self, kind: type[Tensor], home: Tensor, record: StoredParameter, *, coded: Paged | None = None) -> Tensor:
        """See Views.show."""
        if coded is None:
            shown = _dtensor(home.detach(), self._spec)
            shown.__class__ = _KINDS[kind]
            return shown
        local = CodedHomeTensor.of(coded, home)
        local.record = weakref.ref(record)
        shown = _dtensor(local, self._spec)
        shown.__class__ = CodedTensorShard
        return shown

    def seat(self, parameter: Parameter, home: Tensor, *, as_home: bool) -> Parameter:
        """See Views.seat. Return a new parameter: a plain one cannot become a DTensor. The old one loses its memory."""
        given = distributed_of(parameter)
        registered = parameter if given is None else given
        if registered._backward_hooks or registered._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"a parameter of {tuple(registered.shape)} has hooks, which the DTensor in its place would not have; "
                "register them after zinf_compile.optimize(model)"
            )
        seated = Parameter(_dtensor(home.detach(), self._spec), parameter.requires_grad)
        own = {name: value for name, value in registered.__dict__.items() if name not in _OF_A_DTENSOR}
        seated.__dict__.update(own)
        seated.__class__ = HomeParameterShard
        mark_replaced(registered, seated)
        if not parameter.is_meta:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        if isinstance(registered, DTensor):
            registered._local_tensor = parameter.detach()
        return seated

    def move(self, shown: Tensor, home: Tensor) -> None:
        """See Views.move."""
        assert isinstance(shown, DTensor)
        if isinstance(shown, CodedTensorShard):
            shown._local_tensor.move(home)
        else:
            shown._local_tensor = home.detach()

    def of_whole(self, value: Tensor) -> Tensor:
        """See Views.of_whole. Of a DTensor of the user's it is one with the same placements."""
        if self._given is None:
            return value
        if value.requires_grad:
            value.register_hook(_await_collective)
        mesh, placements, shape = self._given.mesh, self._given.placements, self._given.shape
        return DTensor.from_local(
            value, mesh, placements, run_check=False, shape=shape, stride=make_contiguous_strides_for(shape)
        )

    def in_graph(self) -> Callable[[Tensor], Tensor] | None:
        """See Views.in_graph. Dynamo traces through what this returns, and guards each name that it reads."""
        if self._given is None:
            return None
        mesh, placements, shape = self._given.mesh, self._given.placements, self._given.shape
        stride = make_contiguous_strides_for(shape)

        def as_given(value: Tensor) -> Tensor:
            return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)

        return as_given

    def of_shard(self, shard: Tensor) -> Tensor:
        """See Views.of_shard."""
        return _dtensor(shard, self._spec)

    def of_norm(self, norm: Tensor, order: float) -> Tensor:
        """See Views.of_norm. It is the norm of the norms of all shards; of order 0, which counts elements, their sum."""
        placements = [placement if placement.is_replicate() else Shard(0) for placement in self._spec.placements]
        sizes = [self._spec.mesh.size(dim) for dim, each in enumerate(placements) if not each.is_replicate()]
        norms = DTensor.from_local(
            norm.view(1),
            self._spec.mesh,
            placements,
            run_check=False,
            shape=torch.Size([math.prod(sizes)]),
            stride=(1,),
        )
        whole: Tensor = torch.linalg.vector_norm(norms, order) if order else norms.sum()
        return whole

    def spread_largest(self, number: Tensor) -> None:
        """See Views.spread_largest."""
        for dim in range(0 if self._given is None else self._given.mesh.ndim):
            assert self._given is not None
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._given.mesh.get_group(dim))


def describe_placements(spec: DTensorSpec) -> str:
    """Return how a DTensor lies over ranks, as text: "Shard(dim=0) over 'tp'"."""
    names = spec.mesh.mesh_dim_names or [f"dimension {dim}" for dim in range(spec.mesh.ndim)]
    return ", ".join(f"{placement!r} over '{name}'" for placement, name in zip(spec.placements, names, strict=True))


_OF_A_DTENSOR = frozenset({"_local_tensor", "_spec"})  # attributes that make a DTensor what it is


def _spec_of(ranks: Ranks, parameter: Parameter, given: DTensorSpec | None) -> DTensorSpec:
    """Return how a parameter that ranks store lies over them and over the ranks of the user's placements, if it has some."""
    shape = parameter.shape if given is None else given.shape
    meta = TensorMeta(shape, make_contiguous_strides_for(shape), parameter.dtype)
    if ranks.is_alone:
        assert given is not None
        return DTensorSpec(given.mesh, given.placements, tensor_meta=meta)
    assert ranks.mesh is not None
    replicated = [Replicate()] * (ranks.mesh.ndim - 1)
    if given is None:
        return DTensorSpec(ranks.mesh, (*replicated, Shard(0)), tensor_meta=meta)
    num_shards = given.num_shards_map[0]
    rows = _StridedShard(0, split_factor=num_shards) if num_shards > 1 else Shard(0)
    mesh = DeviceMesh._concatenate([ranks.mesh, given.mesh])
    return DTensorSpec(mesh, (*replicated, rows, *given.placements), tensor_meta=meta)


def _dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return the DTensor of a local tensor, which may be a view, as of this rank's rows of a parameter that is whole.

    It has no memory of its own, but takes the offset of the local tensor in its storage, and with one torch answers
    ``data_ptr()`` with that: torch.distributed.checkpoint, when it saves asynchronously, then looks for memory there.
    """
    empty = torch.empty(0, dtype=local.dtype, device=local.device)
    shown = DTensor(empty, copy.copy(spec), requires_grad=False)  # torch may change the specs of tensors
    shown._local_tensor = local
    return shown


def _await_collective(grad: Tensor) -> Tensor:
    """Return a gradient whose last collective is done."""
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad
