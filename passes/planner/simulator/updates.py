"""The updates of an optimizer step beside compute. They use the disk when nothing else does, in the order queued.

At most two are in progress: while one is written, the next is read. If both could use a lane, the older one does. Where
updates run on the processors that also compute, compute loses the seconds in which both do.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Placement, Plan
from zinf_compile.passes.planner.simulator.lanes import Lanes

_MAX_UNDER_WAY = 2


class _Update(NamedTuple):
    """An update that has not started, or one that is computed and not yet written."""

    placement: Placement
    after: tuple[int, ...]
    nbytes_read: int = 0
    nbytes_written: int = 0
    nbytes_updated: int = 0  # of gradients, on the host; 0 where an update ahead of step() is only read back
    # On a device only the copies there and back take time, or what it reads and writes in host memory in place.
    nbytes_in: int = 0
    nbytes_out: int = 0
    nbytes_in_place: int = 0


class DeviceShare:
    """Which updates run on a device with memory of its own, as ``StreamedStep`` decides: asked in the order queued."""

    def __init__(self, plan: Plan) -> None:
        self._has_device, self._share = plan.updates_on_device, plan.step.device_share
        self._ahead = frozenset(plan.step.ahead)
        # Of gradients: of the updates asked for so far that share out the device, and of those that run there.
        self._nbytes = self._nbytes_on_device = 0

    def takes(self, placement: Placement) -> bool:
        """Return whether the next update queued, of a placement, runs on the device."""
        if not self._has_device:
            return False
        if placement.has_device_state or placement.parameter in self._ahead:
            return True
        self._nbytes += placement.gradient_nbytes
        wanted = self._nbytes_on_device + placement.gradient_nbytes <= self._share * self._nbytes
        self._nbytes_on_device += placement.gradient_nbytes if wanted else 0
        return wanted


def in_order_of_use(plan: Plan) -> list[Placement]:
    """Return the placements of a plan in the order in which their updates are queued at ``step()``."""
    first_use = {use.parameter: use.ticks[0] for use in plan.uses}
    return sorted(plan.placements, key=lambda item: first_use.get(item.parameter, plan.num_ticks))


class Updates:
    """The thread that runs the updates of one step: those that are queued, and the nodes that end the others."""

    def __init__(self, plan: Plan, lanes: Lanes) -> None:
        self._lanes = lanes
        # A placement does not count elements. Gradients have one dtype, so the seconds are divided by their bytes.
        nbytes = sum(placement.gradient_nbytes for placement in plan.placements)
        seconds = plan.step.num_elements / plan.hardware.optimizer_elements_per_second
        self._seconds_per_nbyte = seconds / nbytes if nbytes else 0.0
        self._seconds_per_nbyte_in_place = 1 / plan.hardware.memory_bytes_per_second
        self._is_in_place = plan.is_updated_in_place
        self._device = DeviceShare(plan)
        self._shadows = plan.shadow_tier
        self._queued: deque[_Update] = deque()
        self._early: list[_Update] = []  # ahead of step(): the newest begins first, once the others have begun
        self._unwritten: deque[_Update] = deque()
        self._unfinished: set[str] = set()
        self._ends: dict[str, tuple[int, ...]] = {}  # by parameter: the nodes after which its update is written
        self._last_ends: deque[tuple[int, ...]] = deque([()] * _MAX_UNDER_WAY, maxlen=_MAX_UNDER_WAY)
        self._idle_until = 0.0  # a lower bound: nothing that is left starts earlier, since lanes only get busier

    def queue(
        self, placement: Placement, after: tuple[int, ...], *, with_gradient: bool, is_ahead: bool = False
    ) -> None:
        """Queue the update of a parameter, which may start after some nodes; a frozen one has none.

        ``is_ahead``: before ``step()``, so that all of it is written to shadows.
        """
        if placement.gradient_nbytes:
            away = placement.reloaded_nbytes(self._shadows) if is_ahead else 0
            written, read = placement.update_nbytes_written, placement.update_nbytes_read
            if not with_gradient and placement.gradient is Tier.NVME:
                read -= placement.gradient_nbytes
            if not self._device.takes(placement):
                update = _Update(placement, after, read, written + away, placement.gradient_nbytes)
            elif self._is_in_place(placement):
                update = _Update(placement, after, read, written, nbytes_in_place=placement.update_nbytes_with_host)
            else:
                there, back = placement.update_nbytes_to_device, placement.update_nbytes_to_host + away
                update = _Update(placement, after, read, written, nbytes_in=there, nbytes_out=back)
            self._append(update, is_ahead=is_ahead)

    def queue_reload(self, placement: Placement) -> None:
        """Queue what is copied home from shadows, of an update ahead of ``step()``, if there is anything."""
        if nbytes := placement.reloaded_nbytes(self._shadows):
            is_read = self._shadows is Tier.NVME
            self._append(
                _Update(placement, (), nbytes_read=nbytes if is_read else 0, nbytes_in=0 if is_read else nbytes)
            )

    def _append(self, update: _Update, *, is_ahead: bool = False) -> None:
        (self._early if is_ahead else self._queued).append(update)
        self._unfinished.add(update.placement.parameter)
        self._idle_until = 0.0

    def advance(self, now: float) -> None:
        """Start what can start before ``now``."""
        while self._idle_until < now and self._place_next(before=now):
            pass

    def finish(self, parameters: Iterable[str]) -> tuple[int, ...]:
        """Run updates, in order, until those of ``parameters`` are done; return the nodes that end these."""
        names = tuple(parameters)
        for name in names:
            while name in self._unfinished:
                self._place_next(before=math.inf)
        return tuple(node for name in names for node in self._ends.get(name, ()))

    @property
    def unfinished(self) -> frozenset[str]:
        """Return the parameters whose updates have not ended."""
        return frozenset(self._unfinished)

    def finish_all(self) -> None:
        """Run all updates that are left."""
        while self._place_next(before=math.inf):
            pass

    def _place_next(self, *, before: float) -> bool:
        """Start the write or the update that can start first, if that is ``before`` a moment; return whether one was."""
        write = self._lanes.start_of(Tier.HOST, Tier.NVME, self._unwritten[0].after) if self._unwritten else math.inf
        begin = math.inf
        update = None
        if (self._queued or self._early) and len(self._unwritten) < _MAX_UNDER_WAY:
            update = self._queued[0] if self._queued else self._newest_ready()
            after = (*update.after, *self._last_ends[0])
            begin = self._may_begin(update, after)
        if min(write, begin) >= before:
            self._idle_until = min(write, begin)
            return False
        self._idle_until = 0.0
        if update is None or write <= begin:
            self._write(self._unwritten.popleft())
        else:
            if self._queued:
                self._queued.popleft()
            else:
                self._early.remove(update)
            self._begin(update, after)
        return True

    def _may_begin(self, update: _Update, after: tuple[int, ...]) -> float:
        """Return the seconds at which an update may begin after some nodes."""
        if update.nbytes_read:
            return self._lanes.start_of(Tier.NVME, Tier.HOST, after)
        if update.nbytes_in:  # when the link is free: copies that are asked for meanwhile wait for one update only
            return self._lanes.start_of(Tier.HOST, Tier.DEVICE, after)
        return self._lanes.end_of(after)

    def _newest_ready(self) -> _Update:
        """Return the newest update ahead of ``step()`` that need not wait for its gradient; if all must, the first."""
        earliest = math.inf
        for update in reversed(self._early):
            home = self._lanes.end_of(update.after)
            if home <= self._may_begin(update, self._last_ends[0]):
                return update
            if home <= earliest:
                earliest, first = home, update
        return first

    def _begin(self, update: _Update, after: tuple[int, ...]) -> None:
        """Append the read of an update and, chunk by chunk beside it, its computation."""
        placement = update.placement
        if update.nbytes_in:
            self._begin_on_device(update, after)
            return
        seconds = update.nbytes_updated * self._seconds_per_nbyte
        seconds += update.nbytes_in_place * self._seconds_per_nbyte_in_place
        if update.nbytes_read:
            read = self._lanes.move(Tier.NVME, Tier.HOST, f"update of {placement.parameter}", update.nbytes_read, after)
            computed = self._lanes.update(f"optimizer ({placement.parameter})", seconds, self._lanes.nodes[read].after)
            after = (read, computed)
        else:
            after = (self._lanes.update(f"optimizer ({placement.parameter})", seconds, after),)
        self._computed(update, after)

    def _begin_on_device(self, update: _Update, after: tuple[int, ...]) -> None:
        """Append the read of an update, the copy to the device and the copy back."""
        name = f"update of {update.placement.parameter}"
        if update.nbytes_read:
            after = (self._lanes.move(Tier.NVME, Tier.HOST, name, update.nbytes_read, after),)
        end = self._lanes.move(Tier.HOST, Tier.DEVICE, name, update.nbytes_in, after)
        if update.nbytes_out:
            end = self._lanes.move(Tier.DEVICE, Tier.HOST, name, update.nbytes_out, (end,))
        self._computed(update, (end,))

    def _computed(self, update: _Update, after: tuple[int, ...]) -> None:
        """Queue the write of an update that is computed; without one it is done."""
        if update.nbytes_written:
            self._unwritten.append(update._replace(after=after, nbytes_read=0))
        else:
            self._end(update.placement, after)

    def _write(self, update: _Update) -> None:
        """Append the write of an update that is computed."""
        name, nbytes = f"update of {update.placement.parameter}", update.nbytes_written
        self._end(update.placement, (self._lanes.move(Tier.HOST, Tier.NVME, name, nbytes, update.after),))

    def _end(self, placement: Placement, nodes: tuple[int, ...]) -> None:
        self._unfinished.discard(placement.parameter)
        self._ends[placement.parameter] = nodes
        if placement.update_nbytes_read:  # the others hold no staging
            self._last_ends.append(nodes)
