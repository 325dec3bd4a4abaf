"""What users see of a stored parameter of which each rank has a shard: DTensors, as under FSDP2.

``state_dict()``, ``clip_grad_norm_``, ``full_tensor()``, printing and torch.distributed.checkpoint mean what they mean
for any DTensor. The local tensor is this rank's home tensor, and its values are waited for as those of any home tensor.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter

from zinf_compile.ir.errors import UnsupportedError
from zinf_compile.runtime.params.home import HomeParameter, HomeTensor, await_home
from zinf_compile.runtime.params.home_gradient import HomeGradient
from zinf_compile.runtime.params.records import StoredParameter, mark_replaced, record_of
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.storage.state_codes import Paged


class _Shard(HomeTensor, DTensor):
    """A home tensor of which this rank has a shard. DTensor's own methods do not pass ``__torch_function__``."""

    def to_local(self, **kwargs: Any) -> Tensor:
        """Return this rank's shard."""
        await_home(self)
        return super().to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """Return the full value, gathered from all ranks. RankError if one is gone, or cannot go on after an error."""
        await_home(self)
        with _naming_lost_ranks(self.record()):
            return super().full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return it with other placements."""
        await_home(self)
        return super().redistribute(*args, **kwargs)

    def _as_plain(self) -> Tensor:
        return DTensor(self._local_tensor, self._spec, requires_grad=False)


class HomeTensorShard(_Shard):
    """This rank's shard of a tensor of optimizer state."""


class HomeGradientShard(HomeGradient, _Shard):
    """This rank's shard of a gradient."""


class HomeParameterShard(HomeParameter, DTensor):
    """A parameter of which this rank has a shard."""

    def to_local(self, **kwargs: Any) -> Tensor:
        """Return this rank's shard, which may be written: the compute copy is then refreshed."""
        await_home(self)
        if (record := record_of(self)) is not None:
            record.copies.expose()
        return super().to_local(**kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """Return the full value, gathered from all ranks. RankError if one is gone, or cannot go on after an error."""
        await_home(self)
        with _naming_lost_ranks(record_of(self)):
            return super().full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return it with other placements."""
        await_home(self)
        return super().redistribute(*args, **kwargs)


def _naming_lost_ranks(record: StoredParameter | None) -> AbstractContextManager[None]:
    """Return a block in which an error of a collective becomes a RankError, which an earlier error raises at once."""
    if record is None:
        return nullcontext()
    record.store.ranks.check_together()
    return record.store.ranks.raising(f"the gather of {record.name}")


_KINDS: dict[type[Tensor], type[DTensor]] = {HomeTensor: HomeTensorShard, HomeGradient: HomeGradientShard}


class ShardViews:
    """See ``Views``."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def show(self, kind: type[Tensor], home: Tensor, record: StoredParameter, *, coded: Paged | None = None) -> Tensor:
        """See Views.show."""
        assert coded is None, "state of several ranks is exact"
        shown = self._dtensor(home.detach(), record.parameter.shape)
        shown.__class__ = _KINDS[kind]
        return shown

    def seat(self, parameter: Parameter, home: Tensor, *, as_home: bool) -> Parameter:
        """See Views.seat. Return a new parameter: a plain one cannot become a DTensor. The old one loses its memory."""
        seated = Parameter(self._dtensor(home.detach(), parameter.shape), parameter.requires_grad)
        seated.__dict__.update(parameter.__dict__)
        seated.__class__ = HomeParameterShard
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"a parameter of {tuple(parameter.shape)} has hooks, which the DTensor in its place would not have; "
                "register them after zinf_compile.optimize(model)"
            )
        mark_replaced(parameter, seated)
        if not parameter.is_meta:
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        return seated

    def move(self, shown: Tensor, home: Tensor) -> None:
        """See Views.move."""
        assert isinstance(shown, DTensor)
        shown._local_tensor = home.detach()

    def of_shard(self, shard: Tensor, record: StoredParameter) -> Tensor:
        """See Views.of_shard."""
        return self._dtensor(shard, record.parameter.shape)

    def of_norm(self, norm: Tensor, order: float) -> Tensor:
        """See Views.of_norm. It is the norm of the norms of all shards; of order 0, which counts elements, their sum."""
        norms = self._dtensor(norm.view(1), torch.Size([self._ranks.size]))
        whole: Tensor = torch.linalg.vector_norm(norms, order) if order else norms.sum()
        return whole

    def _dtensor(self, local: Tensor, shape: torch.Size) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        mesh = self._ranks.mesh
        placements = [Shard(0)] if mesh is None or mesh.ndim == 1 else [Replicate(), Shard(0)]
        made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        made._local_tensor = local  # from_local makes a view, whose base would count as an alias that a user holds
        return made
