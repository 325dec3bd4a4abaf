"""Plans that tests share are those that would be made, and are made again when a test changes the planner."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.support import run_cache
from tests.support.shared_plans import shared_plans
from zinf_compile.driver import planning
from zinf_compile.ir.errors import DeviceCapacityError
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.memory import policies
from zinf_compile.passes.planner.placement import homes
from zinf_compile.passes.planner.search.planner import Request, Searches, make_plan


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """Share plans; return the requests that were planned."""
    requests: list[Request] = []

    def make(request: Request, searches: Searches | None = None) -> Plan:
        requests.append(request)
        return make_plan(request, searches)

    monkeypatch.setattr(planning, "make_plan", make)
    with shared_plans():
        yield requests


@pytest.fixture
def request_for(request_of: Callable[..., Request], request: pytest.FixtureRequest) -> Request:
    """Return a request that no other test makes."""
    return replace(request_of(0, device=12 * 2**20), name=request.node.nodeid)


def test_a_plan_is_made_once(request_for: Request, made: list[Request]) -> None:
    first = planning.make_plan(request_for)
    run_cache._loaded.clear()  # as in another process
    assert planning.make_plan(request_for) == first == make_plan(request_for)
    assert len(made) == 1
    other = replace(request_for, config=replace(request_for.config, device_memory=11 * 2**20))
    assert planning.make_plan(other) == make_plan(other)
    assert len(made) == 2


def test_what_does_not_fit_is_refused_every_time(request_for: Request, made: list[Request]) -> None:
    request = replace(request_for, config=replace(request_for.config, device_memory=1))
    refused = []
    for _ in range(3):
        with pytest.raises(DeviceCapacityError) as caught:
            planning.make_plan(request)
        caught.value.add_note("of one test")
        refused.append((str(caught.value), caught.value.needed_nbytes, len(caught.value.__notes__)))
        run_cache._loaded.clear()
    assert refused == [refused[0]] * 3
    assert len(made) == 1


def test_a_changed_planner_plans_again(
    request_for: Request, made: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    planning.make_plan(request_for)
    monkeypatch.setattr(homes, "RESIDENT_THRESHOLD", 0)
    for _ in range(2):
        planning.make_plan(request_for)
    assert len(made) == 2
    monkeypatch.setattr(policies, "may_be_faster", lambda *_: True)
    for _ in range(2):
        planning.make_plan(request_for)
    assert len(made) == 4
