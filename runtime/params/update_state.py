"""The update of a stored parameter: whether one is in flight, or has failed, and how many there were.

Only this file writes the fields of ``UpdateState``.
"""

from concurrent.futures import Future
from dataclasses import dataclass, field

from zinf_compile.runtime.transfer.in_flight import InFlight


@dataclass(slots=True, kw_only=True, eq=False)
class UpdateState:
    """The optimizer steps of one parameter. Backward compares their number with that at its forward."""

    future: "Future[None] | None" = None  # of an update in the background; done when all of it is home
    gathers: list[InFlight] = field(default_factory=list)  # over a link, which may still read what an update writes
    is_read_in_place: bool = False  # by ops of a device, in host memory, which may not be done
    count: int = 0  # of optimizer steps
    forward_count: int = 0  # at the last forward of a captured graph that reads the parameter
    is_torn: bool = False  # an update of it began and did not finish
    why_torn: str | None = None  # the error that came, if it is known
    num_looks: int = 0  # at the values or the optimizer state, by users, who may write what they look at
    is_early: bool = False  # updated in backward, by the step that optimizer.step() is to end

    def begin(self, future: "Future[None]") -> None:
        """Make every access to the parameter wait for an update from now on."""
        self.future = future
        self.count += 1

    def note_look(self) -> None:
        """Note that a user looks at the parameter or its optimizer state."""
        self.num_looks += 1

    def end_wait(self, future: "Future[None]") -> None:
        """Forget an update that is done, unless another one has begun."""
        if self.future is future:
            self.future = None

    def tear(self, why: str | None = None) -> None:
        """Note that the value is about to change, element by element: until ``mend`` it is neither old nor new.

        ``why`` tells of an error because of which it will stay so.
        """
        self.is_torn, self.why_torn = True, why or self.why_torn

    def mend(self) -> None:
        """Note that the value is consistent: all of the update is stored, or none of it was begun."""
        self.is_torn, self.why_torn = False, None

    def rewrite(self) -> None:
        """Note that the parameter has a new value: a backward whose forward saw the old one is refused."""
        self.is_torn = self.is_early = False
        self.why_torn = None
        self.count += 1

    def begin_early(self) -> None:
        """Note that backward updates the parameter, before ``optimizer.step()``."""
        self.is_early = True

    def end_early(self) -> None:
        """Note that ``optimizer.step()`` has ended the step that backward began."""
        self.is_early = False

    def note_forward(self) -> None:
        """Note that a captured forward reads the value that there is now."""
        self.forward_count = self.count

    @property
    def is_since_forward(self) -> bool:
        """Return whether the parameter was updated since the last captured forward."""
        return self.forward_count != self.count

    def note_gather(self, gather: InFlight) -> None:
        """Remember a gather that may still read what the next update writes. One that covers several tiles counts once."""
        self.gathers = [each for each in self.gathers if not each.is_done and each is not gather]
        self.gathers.append(gather)

    def note_read_in_place(self) -> None:
        """Note that ops which are about to be enqueued read a copy in host memory."""
        self.is_read_in_place = True

    def end_reads_in_place(self) -> None:
        """Note that all ops that read a copy in host memory are done."""
        self.is_read_in_place = False
