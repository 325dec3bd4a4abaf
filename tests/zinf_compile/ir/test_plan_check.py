"""Malicious plan files: each is rejected quickly, or can be shown without harm."""

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.hand_made_plans import make_report
from zinf_compile.hardware.profile_io import load_hardware
from zinf_compile.inspect.chrome_trace import save_chrome_trace
from zinf_compile.inspect.html.page import save_html_page
from zinf_compile.inspect.memory_viz import save_memory_viz
from zinf_compile.inspect.plan_difference import dump_plan_difference
from zinf_compile.inspect.plan_view import PlanView
from zinf_compile.inspect.printing import dump_plan
from zinf_compile.ir.errors import ConfigError, PlanFileError
from zinf_compile.ir.plan import Plan
from zinf_compile.ir.plan_io import load_plan, plan_to_json

_EXTREMES = [0, 1, -1, 7, 10**12, 2**63, 10**30, -(10**18), 0.0, 1e-300, 1e300, -1.5, 1e12, "", "x", [], {}, None, True]
Place = tuple[str | int, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the path of every field and item of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def at(document: Any, place: Place) -> Any:
    for key in place:
        document = document[key]
    return document


def change(generator: random.Random, old: Any) -> Any:
    """Return a different value, near the old one or far from it."""
    if isinstance(old, list) and old and generator.random() < 0.5:
        return generator.choice([[], old[:-1], [*old, old[-1]], old[::-1]])
    if isinstance(old, int | float) and not isinstance(old, bool) and generator.random() < 0.3:
        return generator.choice([old + 1, old - 1, old * 2, old // 2 if isinstance(old, int) else old / 2])
    return generator.choice(_EXTREMES)


def look_at(plan: Plan, other: Plan, folder: Path) -> None:
    dump_plan(plan)
    dump_plan_difference(plan, other)
    dump_plan_difference(other, plan)
    save_chrome_trace(plan, folder / "trace.json")
    save_memory_viz(plan, folder / "memory.pickle")


@pytest.mark.long
def test_no_change_of_a_file_does_harm(swapping_plan: Plan, tmp_path: Path) -> None:
    """Any field of any record gets values of all kinds: PlanFileError, or a plan that all views can show."""
    generator = random.Random(0)
    path = tmp_path / "plan.json"
    num_shown = num_refused = 0
    document = json.loads(plan_to_json(swapping_plan))
    alike: dict[Place, list[Place]] = defaultdict(list)
    for place in places(document):
        alike[tuple(key if isinstance(key, str) else 0 for key in place)].append(place)
    for group in alike.values():
        for _ in range(6):
            *outer, key = generator.choice(group)
            changed = json.loads(json.dumps(document))
            container = at(changed, tuple(outer))
            container[key] = change(generator, container[key])
            path.write_text(json.dumps(changed))
            started = time.process_time()
            try:
                loaded = load_plan(path)
            except PlanFileError:
                num_refused += 1
            else:
                num_shown += 1
                look_at(loaded, swapping_plan, tmp_path)
            assert time.process_time() - started < 1, (outer, key, container[key])
    assert num_shown > 100
    assert num_refused > 400


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (
            ("schedule", "runs", 1, "end"),
            10**12,
            "schedule: 1,000,000,000,000 ticks are more than the 2,000,000 that a graph can have",
        ),
        (("schedule", "runs", 1, "end"), -1, r"schedule\.runs\[1\]\.end: -1 is not between 0 and"),
        (("schedule", "runs", 1, "end"), 11, "spans: they end at tick 12, and there are 11"),
        (("schedule", "runs", 1, "end"), 5, "schedule: a run ends before it starts"),
        (("schedule", "runs", 1, "start"), 7, "schedule: it is not that of one forward, and of one backward after it"),
        (("schedule", "runs", 1, "stage"), 1, "schedule: it is not that of one forward"),
        (("schedule", "runs", 0, "phase"), "step", "schedule: it is not that of one forward"),
        (("schedule", "runs"), [], "schedule: it is not that of one forward"),
        (("tiers",), [], "tiers: it speaks 0 times of device, not once"),
        (("bound", 0, "live", "end"), 2**40, r"bound\[0\]: ticks 1, 1099511627776 are not ones of the plan"),
        (
            ("hardware", "routes", 0, "bytes_per_second"),
            0.0,
            r"hardware\.routes\[0\]\.bytes_per_second: 0 is not between 1",
        ),
        (("hardware", "routes"), [], "hardware.routes: there is not one"),
        (("num_ranks",), 0, "num_ranks: 0 is not between 1 and"),
        (("num_ranks",), 2, "num_ranks: paper has no node links, which 2 ranks need"),
        (("num_replicas",), 0, "num_replicas: 0 is not between 1 and"),
        (("num_replicas",), 2, "num_replicas: paper has no node links, which 2 ranks need"),
        (("transfers", 0, "parameters"), ["x"], "transfers: 'x' is no parameter of the plan"),
        (("transfers", 0, "source"), "device", r"transfers\[0\]: it moves no parameters to the device"),
        (("transfers", 0, "destination"), "host", r"transfers\[0\]: it moves no parameters to the device"),
        (("transfers", 0, "offsets"), [], r"transfers\[0\]: it has 0 offsets in the arena, not 1"),
        (("transfers", 0, "what"), "gradient", r"transfers\[0\]: it moves no gradient that the device has"),
        (("transfers", 0, "what"), "activation", r"transfers: 'layers.0' leaves 0 times and comes back 1 times"),
        (("transfers", 1, "need_by"), 0, r"transfers\[1\]: ticks 1, 0, 5 are not ones of the plan in their order"),
        (("transfers", 0, "issue"), 3, r"transfers: they are not in the order in which they are issued"),
        (("placements", 2, "copies"), [], r"placements\[2\]\.copies: 'layers.0.weight' has to have one compute copy"),
        (
            ("placements", 2, "copies", 0, "role"),
            "gradient",
            r"placements\[2\]\.copies: .* has to have one compute copy",
        ),
        (
            ("placements", 2, "copies", 0, "slice", "length"),
            51,
            r"copies: 'layers.0.weight' of shape \(50,\) has no such",
        ),
        (("placements", 2, "copies", 0, "slice", "dim"), 1, r"copies: 'layers.0.weight' of shape \(50,\) has no such"),
        (("placements", 2, "copies", 1, "slice", "parameter"), "x", r"copies: they are of several parameters"),
        (("placements", 2, "copies", 0, "encoding", "dtype"), "float31", r"copies: 'float31' is no dtype"),
        (
            ("placements", 2, "copies", 0, "encoding", "code"),
            "int8",
            r"only optimizer state in float32 is stored as int8",
        ),
        (("placements", 2, "copies", 2, "state"), None, r"copies: a state copy has to say which state it is"),
        (("placements", 2, "copies", 2, "tier"), "host", r"copies: the optimizer state .* is on several tiers"),
    ],
)
def test_what_is_wrong_is_named(small_plan: Plan, tmp_path: Path, place: Place, value: object, message: str) -> None:
    document = json.loads(plan_to_json(small_plan))
    at(document, place[:-1])[place[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=rf"plan\.json is damaged at .*{message}.*; save the plan again"):
        load_plan(tmp_path / "plan.json")


def test_ranks_of_all_replicas_have_to_fit_the_nodes(small_plan: Plan, tmp_path: Path) -> None:
    links = {"device_link_bytes_per_second": 100.0, "node_link_bytes_per_second": 100.0}
    hardware = replace(small_plan.hardware, devices_per_node=4, num_nodes=2, **links)
    for num_ranks, num_replicas, problem in (
        (4, 2, None),
        (1, 8, None),
        (8, 1, None),
        (4, 3, "num_replicas: 12 ranks do not fit 2 nodes of 4 devices"),
        (12, 1, "num_ranks: 12 ranks do not fit 2 nodes of 4 devices"),
        (3, 2, "num_replicas: 6 ranks do not fill whole nodes"),
    ):
        plan = replace(small_plan, hardware=hardware, num_ranks=num_ranks, num_replicas=num_replicas)
        (tmp_path / "plan.json").write_text(plan_to_json(plan))
        if problem is None:
            assert load_plan(tmp_path / "plan.json") == plan
            continue
        with pytest.raises(PlanFileError, match=problem):
            load_plan(tmp_path / "plan.json")


def test_other_things_than_files(tmp_path: Path) -> None:
    """They are rejected, and a FIFO without a writer does not block."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for load in (load_plan, load_hardware):
        for name, what in (("fifo", "a FIFO"), ("folder", "a folder")):
            with pytest.raises(ConfigError, match=f"it is {what}, not a regular file"):
                load(tmp_path / name)
        with pytest.raises(ConfigError, match="it is a device, not a regular file"):
            load("/dev/zero")


def test_names_cannot_forge_a_line_of_an_error() -> None:
    error = ConfigError("two problems with 'weight\nor none':", "'a\x1b[2J'", "'b'")
    assert str(error) == "two problems with 'weight\\nor none':\n  'a\\x1b[2J'\n  'b'"


def test_names_cannot_steer_a_terminal(small_plan: Plan, tmp_path: Path) -> None:
    """Names of the model, parameters, modules, hardware and values: control characters are printed escaped."""
    evil = "\x1b[2J\x07\u202eevil\nforged line\r"
    text = plan_to_json(small_plan)
    for name in ("small", "embed.weight", "layers.0", "paper", "linear", "float32"):
        text = text.replace(json.dumps(name), json.dumps(name + evil))
    # Encodings are not free text: unknown dtypes are rejected.
    text = text.replace(f'{{"dtype": {json.dumps("float32" + evil)},', '{"dtype": "float32",')
    (tmp_path / "plan.json").write_text(text)
    plan = load_plan(tmp_path / "plan.json")
    save_html_page(plan, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text().partition("<body")[2]
    (tmp_path / "other.json").write_text(text.replace('"arena_nbytes"', json.dumps(evil)))
    with pytest.raises(PlanFileError) as caught:
        load_plan(tmp_path / "other.json")
    report = make_report(plan, model=f"Net{evil}", fallbacks=(f"graph 0: runs op by op: {evil}",))
    for shown in (
        dump_plan(plan), str(PlanView(plan)), dump_plan_difference(small_plan, plan), str(report), str(caught.value)
    ):  # fmt: skip
        assert "\\x1b[2J" in shown
        assert all(letter.isprintable() or letter == "\n" for letter in shown)
        assert "\nforged line" not in shown
    assert "Net\\x1b[2J" in repr(report)
    assert repr(report).isprintable()
    assert str(caught.value).isprintable()
    assert not {"\x1b", "\x07", "\u202e"} & set(page)
