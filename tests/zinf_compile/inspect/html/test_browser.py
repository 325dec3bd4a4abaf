"""The page in a real browser: it draws, fits a phone, sorts, searches, zooms, fetches nothing, and executes no names."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zinf_compile.inspect.html.page import save_html_page
from zinf_compile.ir.plan import Plan
from zinf_compile.passes.planner.simulator.simulate import simulate

pytestmark = pytest.mark.browser

SHOWN = "[...document.querySelectorAll('#values tbody tr')].filter(row => row.getClientRects().length)"
NAMES = f"{SHOWN}.map(row => row.cells[0].textContent)"
NUM_SHOWN = f"{SHOWN}.length"
RANGES = "[...document.querySelectorAll('.js-plotly-plot')].map(chart => chart.layout.xaxis.range)"
ALIKE = f"{RANGES}.every(([_, end]) => Math.abs(end - {{}}) < 1e-6)"


@pytest.fixture(scope="module")
def layered_page(layered_plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    save_html_page(layered_plan, path)
    return path


def click(browser: Any, selector: str, index: int = 0) -> None:
    browser.ask(f"document.querySelectorAll({selector!r})[{index}].click()")


def search_for(browser: Any, words: str) -> None:
    browser.ask(f"document.getElementById('search').value = {words!r}")
    browser.ask("document.getElementById('search').dispatchEvent(new Event('input'))")


@pytest.mark.parametrize(("width", "is_phone"), [(1200, False), (360, True)])
@pytest.mark.parametrize("is_dark", [False, True])
def test_it_draws_without_an_error_or_a_request(
    browser: Any, layered_page: Path, width: int, *, is_phone: bool, is_dark: bool
) -> None:
    browser.open(layered_page, width=width, is_phone=is_phone, is_dark=is_dark)
    assert browser.problems == []
    assert browser.requests == [layered_page.as_uri()]
    assert browser.ask("document.documentElement.scrollWidth") == width
    assert browser.ask("window.innerWidth") == width
    for chart, num_traces in (("memory-device", 4), ("memory-host", 5), ("memory-nvme", 4), ("lanes", 5)):
        drawn = "document.querySelectorAll('#{} g.{}').length"
        assert browser.ask(drawn.format(chart, "trace")) == num_traces
        assert browser.ask(f"document.querySelector('#{chart} svg').clientWidth") <= width
    assert browser.ask("document.querySelectorAll('#lanes .point path').length") == 241
    assert browser.ask("parseFloat(getComputedStyle(document.body).fontSize)") >= 16


def test_text_of_charts_is_readable_in_the_dark(browser: Any, layered_page: Path) -> None:
    color = "getComputedStyle(document.querySelector('#lanes .xtick text')).fill"
    browser.open(layered_page, width=800)
    in_light = browser.ask(color)
    browser.open(layered_page, width=800, is_dark=True)
    assert browser.ask(color) == browser.ask("getComputedStyle(document.body).color")
    assert browser.ask(color) != in_light


@pytest.mark.parametrize(("width", "is_phone"), [(1200, False), (360, True)])
def test_the_table_sorts_and_searches(browser: Any, layered_page: Path, width: int, *, is_phone: bool) -> None:
    browser.open(layered_page, width=width, is_phone=is_phone)
    num_rows = browser.ask("document.querySelectorAll('#values tbody tr').length")
    assert browser.ask(NUM_SHOWN) == 25
    assert browser.ask(NAMES)[0] == "embed.weight"
    sizes = "[...document.querySelectorAll('#values tbody tr')].map(row => Number(row.cells[2].dataset.key))"
    click(browser, "#values th button", 2)
    assert browser.ask(sizes) == sorted(browser.ask(sizes))
    click(browser, "#values th button", 2)
    assert browser.ask(sizes) == sorted(browser.ask(sizes), reverse=True)
    assert browser.ask("document.querySelectorAll('#values th')[2].getAttribute('aria-sort')") == "descending"
    click(browser, "#values th button", 0)
    names = browser.ask(NAMES)
    assert names[:2] == ["embed.weight", "embed.weight"]
    assert "gelu_5" in names
    assert names.index("gelu_5") < names.index("gelu_25") < names.index("gelu_105")
    click(browser, "#more")
    assert browser.ask(NUM_SHOWN) == min(num_rows, 525)
    search_for(browser, "layers.7. GRADIENT")
    assert sorted(browser.ask(NAMES)) == sorted(
        f"layers.7.{name}.weight" for name in ("attn.qkv", "attn.out", "mlp.up", "mlp.down", "norm")
    )
    assert browser.ask("document.getElementById('found').textContent") == "5 of 5 shown."
    search_for(browser, "no such value")
    assert browser.ask(NUM_SHOWN) == 0
    assert browser.problems == []


def test_charts_zoom_together(browser: Any, layered_plan: Plan, layered_page: Path) -> None:
    timeline = simulate(layered_plan)
    browser.open(layered_page, width=1000)
    assert browser.ask(RANGES) == [[0, pytest.approx(timeline.step_seconds)]] * 4
    click(browser, "#ranges button", 1)
    browser.wait_for(ALIKE.format(f"{timeline.phase_seconds[0][1]:.9g}"))
    browser.ask("Plotly.relayout('lanes', {'xaxis.range[0]': 0.1, 'xaxis.range[1]': 0.2}).then(() => 0)")  # as by hand
    browser.wait_for(ALIKE.format(0.2))
    click(browser, "#ranges button", 4)
    browser.wait_for(ALIKE.format(0.175))
    click(browser, "#ranges button", 0)
    browser.wait_for(ALIKE.format(f"{timeline.step_seconds:.9g}"))
    assert browser.problems == []


def test_a_name_that_is_a_script_is_shown_and_not_run(browser: Any, small_plan: Plan, tmp_path: Path) -> None:
    name = "<script>window.ran = 1</script><img src=x onerror='window.ran = 2'></script><b>w</b>"
    placements = tuple(
        replace(each, parameter=name) if each.parameter == "embed.weight" else each for each in small_plan.placements
    )
    uses = tuple(replace(each, parameter=name) if "embed" in each.parameter else each for each in small_plan.uses)
    first, *others = small_plan.transfers
    transfers = (replace(first, name=name), *others)
    plan = replace(small_plan, name=name, placements=placements, uses=uses, transfers=transfers, notes=(name,))
    save_html_page(plan, tmp_path / "plan.html")
    browser.open(tmp_path / "plan.html", width=800)
    assert browser.ask("window.ran === undefined")
    assert browser.problems == []
    assert browser.ask("document.title") == f"Plan of {name}"
    assert name in browser.ask(NAMES)
    hover = "Plotly.Fx.hover('lanes', [{{curveNumber: {0}, pointNumber: 0}}])"
    curve = browser.ask("document.getElementById('lanes').data.findIndex(trace => trace.name === 'parameter')")
    browser.ask(hover.format(curve))
    label = browser.ask("document.querySelector('#lanes .hoverlayer').textContent")
    assert label.startswith("<script>window.ran")
    assert browser.ask("window.ran === undefined && document.querySelector('#lanes .hoverlayer img') === null")


def test_a_deep_model_stays_usable(browser: Any, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    save_html_page(make_plan(300), tmp_path / "plan.html")
    browser.open(tmp_path / "plan.html", width=360, is_phone=True)
    assert browser.problems == []
    assert browser.ask("document.documentElement.scrollWidth") == 360
    assert browser.ask("document.querySelectorAll('#lanes .point path').length") < 3000
    assert browser.ask("document.querySelectorAll('#values tbody tr').length") == 2000
