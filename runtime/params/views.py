"""What users see of a stored parameter: tensors over the bytes of its slots, or DTensors (see ``shard_views``)."""

import torch
from torch import Tensor
from torch.nn import Parameter

from zinf_compile.runtime.params.block_state import show_pages
from zinf_compile.runtime.params.coded_state import CodedHomeTensor
from zinf_compile.runtime.params.home import HomeTensor, PlainHomeParameter, PlainHomeTensor
from zinf_compile.runtime.params.home_gradient import HomeGradient, PlainHomeGradient
from zinf_compile.runtime.params.records import StoredParameter, Views, distributed_of, holders_of
from zinf_compile.runtime.ranks.ranks import Ranks
from zinf_compile.runtime.storage.state_codes import Paged

_KINDS: dict[type[Tensor], type[Tensor]] = {HomeTensor: PlainHomeTensor, HomeGradient: PlainHomeGradient}


class PlainViews:
    """What users see of a plain parameter in a process that trains alone."""

    @property
    def distribution(self) -> str | None:
        """See Views.distribution."""
        return None

    def show(self, kind: type[Tensor], home: Tensor, record: StoredParameter, *, coded: Paged | None = None) -> Tensor:
        """See Views.show."""
        return home.as_subclass(_KINDS[kind]) if coded is None else show_pages(coded, home)

    def seat(self, parameter: Parameter, home: Tensor, *, as_home: bool) -> Parameter:
        """See Views.seat. It stays the same object."""
        self.move(parameter, home)
        if as_home:
            parameter.__class__ = PlainHomeParameter
        return parameter

    def move(self, shown: Tensor, home: Tensor) -> None:
        """See Views.move."""
        if isinstance(shown, CodedHomeTensor):
            shown.move(home)
            return
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in (shown, *holders_of(shown)):
                tensor.data = home

    def of_whole(self, value: Tensor) -> Tensor:
        """See Views.of_whole."""
        return value

    def in_graph(self) -> None:
        """See Views.in_graph."""

    def of_shard(self, shard: Tensor) -> Tensor:
        """See Views.of_shard."""
        return shard

    def of_norm(self, norm: Tensor, order: float) -> Tensor:
        """See Views.of_norm."""
        return norm

    def spread_largest(self, number: Tensor) -> None:
        """See Views.spread_largest."""


def make_views(ranks: Ranks, parameter: Parameter) -> Views:
    """Return what shows a parameter, which is about to be stored, to the users of one of some ranks."""
    if ranks.is_alone and distributed_of(parameter) is None:
        return PlainViews()
    from zinf_compile.runtime.params.shard_views import ShardViews  # DTensor takes half a second to import

    return ShardViews(ranks, parameter)
