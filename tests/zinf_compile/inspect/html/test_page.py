"""The page is self-contained, escapes names, and agrees with the simulation."""

import base64
import gzip
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from zinf_compile.cli.main import main
from zinf_compile.inspect.html.page import make_page, save_html_page
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.glossary import Tier
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.plan_io import save_plan
from zinf_compile.ir.schedule import Schedule
from zinf_compile.passes.planner.simulator.simulate import simulate
from zinf_compile.passes.planner.simulator.summary import tell_bound


class Reader(HTMLParser):
    """Parses a page: its visible text, its tags, and the URLs that it would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self._is_hidden = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data")]
        self._is_hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._is_hidden = False

    def handle_data(self, data: str) -> None:
        if not self._is_hidden:
            self.text += data


@pytest.fixture(scope="module")
def small_page(small_plan: Plan) -> str:
    return make_page(small_plan)


def test_the_page_says_what_the_simulation_says(small_plan: Plan, small_page: str) -> None:
    text = Reader(small_page).text
    assert f"The step is bound by {tell_bound(simulate(small_plan))}." in text
    for said in (
        "Plan of small",
        "59.0 s forward 7.00 s + backward 12.0 s + step 40.0 s",
        "peak 752 B of a budget of 1000 B (75%)",
        "peak 1.6 KiB; as much as the disk has",
        "All 22 events of the step are drawn one by one.",
        "nvme -> device: forward from 0 s, needed at 1.00 s; backward from ",
        "the plan leaves 248 B of device and 1008 B of host free",
        "resident: read in place at 2 ticks",
    ):
        assert said in text, said


def test_a_plan_that_is_over_its_budget_says_by_how_much(small_plan: Plan) -> None:
    device, host, nvme = small_plan.tiers
    text = Reader(make_page(replace(small_plan, tiers=(replace(device, capacity=700), host, nvme)))).text
    assert "no device is 52 B over its budget" in text
    assert "yes no tier's peak is above its budget" in Reader(make_page(small_plan)).text


def test_the_page_is_complete_in_itself(small_page: str) -> None:
    reader = Reader(small_page)
    assert reader.fetched == []
    assert "link" not in reader.tags
    assert "default-src 'none'" in small_page
    (library,) = re.findall(r'<script type="text/plain" id="plotly">([^<]*)</script>', small_page)
    assert re.match(rb"/\*\*\s+\* plotly\.js v\d", gzip.decompress(base64.b64decode(library)))
    assert len(small_page) < 2.2e6, "plotly.js alone has 4.8 MB"


def test_what_looks_like_html_is_text(small_plan: Plan) -> None:
    name = "<script>alert(1)</script>\"'&amp;</td><b>"
    first, *others = small_plan.placements
    gather, *gathers = small_plan.transfers
    reader = Reader(
        make_page(
            replace(
                small_plan,
                name=name,
                placements=(replace(first, parameter=name), *others),
                uses=tuple(
                    replace(use, parameter=name) if "embed" in use.parameter else use for use in small_plan.uses
                ),
                transfers=(replace(gather, name=name), *gathers),
                hardware=replace(small_plan.hardware, name=name),
                notes=(name,),
            )
        )
    )
    plain = Reader(make_page(small_plan))
    assert reader.tags == [*plain.tags[:-2], "section", "h2", "p", "script", "script"]  # the notes, and nothing else
    assert (
        reader.text.count(name) == 4 + 3 + 2
    )  # title, heading, hardware, note; three copies of it; two tables of stalls


def test_values_are_the_largest_first_and_each_copy_has_its_row(layered_plan: Plan) -> None:
    from zinf_compile.inspect.html.value_rows import collect_rows

    rows = collect_rows(simulate(layered_plan))
    assert [row.nbytes for row in rows] == sorted((row.nbytes for row in rows), reverse=True)
    in_parameters = sum(row.nbytes for row in rows if row.what not in ("bound value", "swapped activation"))
    assert in_parameters == sum(placement.nbytes_on(tier) for placement in layered_plan.placements for tier in Tier)
    assert len([row for row in rows if row.what == "bound value"]) == len(layered_plan.bound)


def test_a_swapped_activation_tells_its_way(swapping_plan: Plan) -> None:
    text = Reader(make_page(swapping_plan)).text
    assert "gelu_1swapped activation24 Bhost" in text.replace("\n", "")
    assert re.search(r"leaves at [\d.]+ s, gone by [\d.]+ s; back from [\d.]+ s, needed at [\d.]+ s", text)


def test_an_inference_plan_has_a_page(small_plan: Plan) -> None:
    forward = replace(
        small_plan,
        schedule=Schedule.of_one_graph(6, 6),
        spans=small_plan.spans[:4],
        transfers=small_plan.gathers[:2],
        bound=small_plan.bound[:3],
    )
    assert "A forward pass on paper" in Reader(make_page(forward)).text


def test_the_command_writes_it(small_plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_plan(small_plan, tmp_path / "plan.json")
    assert main(["show", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")]) == 0
    assert f"html written to {tmp_path / 'plan.html'}; open it in a browser" in capsys.readouterr().out
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == make_page(small_plan)


def test_plotly_is_imported_when_a_page_is_made_and_torch_never(small_plan: Plan, tmp_path: Path) -> None:
    save_plan(small_plan, tmp_path / "plan.json")
    script = (
        "import sys; from zinf_compile.cli.main import main; main(['show', 'plan.json']); "
        "assert not {'plotly', 'torch'} & set(sys.modules); main(['show', 'plan.json', '--html', 'plan.html']); "
        "assert {'plotly', 'torch'} & set(sys.modules) == {'plotly'}"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_missing_plotly_and_a_path_that_cannot_be_written_are_errors(
    small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="the page cannot be written to"):
        save_html_page(small_plan, tmp_path / "absent" / "plan.html")
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match="plotly, which is not installed; pip install 'plotly>=6'"):
        save_html_page(small_plan, tmp_path / "plan.html")
