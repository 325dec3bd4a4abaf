"""Plans survive a round trip through JSON, and damaged files are rejected."""

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.support.examples import examples
from zinf_compile.ir import plan_io
from zinf_compile.ir.copies import AnyCode, BlockKind, Blocks, Code
from zinf_compile.ir.errors import ConfigError, PlanFileError
from zinf_compile.ir.plan import PLAN_VERSION, Plan
from zinf_compile.ir.plan_io import load_plan, plan_from_json, plan_schema, plan_schema_text, plan_to_json, save_plan
from zinf_compile.ir.transfers import Moved

REGENERATE = (
    "python -c 'from zinf_compile.ir.plan_io import plan_schema_text; print(end=plan_schema_text())' "
    "> zinf_compile/ir/plan_schema.json"
)

Place = tuple[str | int, ...]


def strategy_for(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a plan field's type."""
    if get_origin(hint) is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return st.lists(strategy_for(items[0]), max_size=2).map(tuple)
        return st.tuples(*map(strategy_for, items))
    if get_args(hint):  # X | None
        return st.one_of(*map(strategy_for, get_args(hint)))
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{field.name: strategy_for(hints[field.name]) for field in fields(hint)})
    if issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    return {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(),
        type(None): st.none(),
    }[hint]


random_plans = strategy_for(Plan).map(lambda plan: replace(plan, version=PLAN_VERSION))


@examples(60, suppress=[HealthCheck.too_slow])
@given(random_plans)
def test_random_plans_survive_the_round_trip(plan: Plan) -> None:
    text = plan_to_json(plan)
    again = plan_from_json(text)
    assert again == plan
    assert plan_to_json(again) == text


def test_hand_made_plans_survive_the_round_trip(small_plan: Plan, layered_plan: Plan, tmp_path: Path) -> None:
    for plan in (small_plan, layered_plan):
        path = tmp_path / "plan.json"
        save_plan(plan, path)
        assert load_plan(path) == plan
        assert hash(load_plan(path)) == hash(plan)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("code", [Code.INT8, Blocks(kind=BlockKind.BITS_4, block=128, signed=True), None])
def test_either_kind_of_code_is_read_as_it_was_written(small_plan: Plan, code: AnyCode | None) -> None:
    first, *others = small_plan.placements
    copies = tuple(replace(each, encoding=replace(each.encoding, code=code)) for each in first.copies)
    plan = replace(small_plan, placements=(replace(first, copies=copies), *others))
    assert plan_from_json(plan_to_json(plan)) == plan


def test_equal_plans_are_equal_bytes(small_plan: Plan) -> None:
    whole = replace(small_plan, spans=tuple(replace(span, seconds=1) for span in small_plan.spans))
    real = replace(small_plan, spans=tuple(replace(span, seconds=1.0) for span in small_plan.spans))
    zero = replace(real, hardware=replace(real.hardware, memory_bytes_per_second=0.0))
    minus = replace(real, hardware=replace(real.hardware, memory_bytes_per_second=-0.0))
    assert plan_to_json(whole) == plan_to_json(real)
    assert plan_to_json(zero) == plan_to_json(minus)


def test_a_record_stands_on_one_line(small_plan: Plan) -> None:
    lines = plan_to_json(small_plan).splitlines()
    assert sum(line.startswith('  {"parameter": "layers.0.weight"') for line in lines) == 2  # placement, use
    assert sum(line.startswith('  {"what": "gradient", "name": "layers.0.weight"') for line in lines) == 1
    assert all(len(line) < 1500 for line in lines)  # the longest is the hardware


# Damage


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the path of every field and item of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*place, key)
        yield from places(item, (*place, key))


def field_path(place: Place) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).removeprefix(".")


def damage(document: Any, place: Place, change: Callable[[Any, Any], None]) -> str:
    """Return the document's text after ``change(container, key)`` at a path."""
    document = json.loads(json.dumps(document))
    container = document
    for key in place[:-1]:
        container = container[key]
    change(container, place[-1])
    return json.dumps(document)


def retag(container: Any, key: Any) -> None:
    """Give a field an invalid JSON type."""
    found = container[key]
    container[key] = ["text"] if isinstance(found, str | bool | dict) or found is None else True


def test_a_dropped_field_is_refused(small_plan: Plan) -> None:
    document = json.loads(plan_to_json(small_plan))
    for place in places(document):
        if isinstance(place[-1], str) and place != ("version",):
            with pytest.raises(PlanFileError, match="lacks the field") as raised:
                plan_from_json(damage(document, place, lambda container, key: container.pop(key)))
            assert f" {field_path(place)};" in str(raised.value)


def test_a_renamed_field_is_refused(small_plan: Plan) -> None:
    document = json.loads(plan_to_json(small_plan))

    def rename(container: Any, key: Any) -> None:
        container[f"{key}_"] = container.pop(key)

    for place in places(document):
        if isinstance(place[-1], str) and place != ("version",):
            with pytest.raises(PlanFileError, match="unknown field") as raised:
                plan_from_json(damage(document, place, rename))
            assert f" {field_path(place)}_;" in str(raised.value)


def test_a_field_of_another_type_is_refused(small_plan: Plan) -> None:
    document = json.loads(plan_to_json(small_plan))
    for place in places(document):
        with pytest.raises(PlanFileError) as raised:
            plan_from_json(damage(document, place, retag))
        assert field_path(place) in str(raised.value)


@examples(100, suppress=[HealthCheck.too_slow])
@given(data=st.data())
def test_cut_text_is_refused(small_plan: Plan, data: st.DataObject) -> None:
    text = plan_to_json(small_plan).rstrip()
    end = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(PlanFileError, match="damaged at line"):
        plan_from_json(text[:end])


@examples(200, suppress=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_changed_character_is_refused_or_read_as_written(small_plan: Plan, data: st.DataObject) -> None:
    text = plan_to_json(small_plan)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.characters()) + text[at + 1 :]
    try:
        plan = plan_from_json(changed)
    except PlanFileError:
        return
    assert json.loads(plan_to_json(plan)) == json.loads(changed)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 10,', "", r"^the plan is not a zinf plan file \(missing 'version'\)"),
        ('"version": 10,', '"version": 1,', r"has version 1, this zinf_compile understands version 10; plan again"),
        ('"version": 10,', '"version": 11,', r"has version 11, this zinf_compile understands version 10; plan again"),
        ('"version": 10,', '"version": true,', r"has version true, this zinf_compile understands version 10"),
        ('"version": 10,', '"version": 10, "version": 10,', r"the field version is given twice"),
        ('"need_by": 3,', '"need_by": "3",', r'damaged at transfers\[1\]\.need_by: "3" is not a JSON integer'),
        ('"need_by": 3,', '"need_by": 3.0,', r"damaged at transfers\[1\]\.need_by: 3.0 is not a JSON integer"),
        ('"need_by": 3,', '"need_by": NaN,', r"NaN is not a finite number"),
        ('"seconds": 2.0,', '"seconds": 1e999,', r"damaged at spans\[1\]\.seconds: Infinity is not a finite number"),
        (
            '"seconds": 2.0,',
            f'"seconds": {10**400},',
            r"damaged at spans\[1\]\.seconds: 1000\S* is not a finite number",
        ),
        ('"need_by": 3,', f'"need_by": {"9" * 5000},', r"damaged: Exceeds the limit"),
        ('"nvme -> device"', "[" * 100_000, r"damaged"),
        ('"source": "nvme"', '"source": "tape"', r'transfers\[0\]\.source: "tape" is not one of device, host, nvme'),
        ('["arena", 512]', '["arenas", 512]', r"tiers\[0\]\.parts\[0\]\[0\]: "),
        ('["arena", 512]', '["arena"]', r"tiers\[0\]\.parts\[0\]: an array of 1 is not an array of 2 items"),
        ('["arena", 512]', '["arena", 512, 1]', r"tiers\[0\]\.parts\[0\]: an array of 3"),
        (
            '"policy": "save"',
            '"policy": null',
            r"activations\.policy: null is not one of save, recompute_values, recompute_more, recompute_blocks",
        ),
    ],
)
def test_the_message_says_what_and_where(small_plan: Plan, old: str, new: str, message: str) -> None:
    text = plan_to_json(small_plan)
    assert old in text
    with pytest.raises(PlanFileError, match=message):
        plan_from_json(text.replace(old, new, 1))


@pytest.mark.parametrize("text", ["null", "[]", "1", '"plan"'])
def test_json_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanFileError, match=r"the plan is damaged at its root: .* is not a JSON object \(Plan\)"):
        plan_from_json(text)


def test_every_kind_of_transfer_is_read_as_it_was_written(swapping_plan: Plan) -> None:
    assert {transfer.what for transfer in swapping_plan.transfers} == set(Moved)
    assert plan_from_json(plan_to_json(swapping_plan)) == swapping_plan


def test_a_file_from_before_transfers_were_one_list_is_refused(small_plan: Plan) -> None:
    """It has the same version number: such files were only written between two releases."""
    document = json.loads(plan_to_json(small_plan))
    sinks = [item for item in document["transfers"] if item["what"] == "gradient"]
    document["transfers"] = [item for item in document["transfers"] if item["what"] != "gradient"]
    old = {**document, "swaps": [], "sinks": sinks}
    with pytest.raises(PlanFileError, match=r"has an unknown field swaps; Plan has .*transfers.*; save the plan again"):
        plan_from_json(json.dumps(old))


def test_the_message_names_the_file(small_plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(plan_to_json(small_plan).replace('"version": 10', '"version": 11'))
    with pytest.raises(PlanFileError, match=r"old\.json has version 11"):
        load_plan(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanFileError, match=r"old\.json is not a plan: byte 0 is not UTF-8"):
        load_plan(path)


def test_files_that_cannot_be_read_or_written(small_plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read: No such file"):
        load_plan(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match=r"cannot be written to .*: No such file"):
        save_plan(small_plan, tmp_path / "absent" / "plan.json")


def test_a_failure_keeps_the_old_file_and_leaves_no_other(
    small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    save_plan(small_plan, path)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigError, match="No space left"):
        save_plan(replace(small_plan, name="other"), path)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    assert load_plan(path) == small_plan


def test_a_number_that_json_does_not_have_is_refused_before_writing(small_plan: Plan, tmp_path: Path) -> None:
    endless = replace(small_plan, spans=(replace(small_plan.spans[0], seconds=float("inf")),))
    with pytest.raises(PlanFileError, match=r"spans\[0\]\.seconds is inf"):
        save_plan(endless, tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


# Schema


def test_the_committed_schema_is_current() -> None:
    committed = Path(plan_io.__file__).with_name("plan_schema.json").read_text(encoding="utf-8")
    assert committed == plan_schema_text(), f"run: {REGENERATE}"


def test_the_schema_describes_every_field(small_plan: Plan) -> None:
    definitions: Any = plan_schema()["$defs"]
    assert definitions["Plan"]["required"] == [field.name for field in fields(Plan)]
    assert definitions["Plan"]["properties"]["version"] == {"const": PLAN_VERSION}
    assert definitions["TierPlan"]["properties"]["capacity"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    for definition in definitions.values():
        if "properties" in definition:
            assert definition["additionalProperties"] is False
            assert definition["required"] == list(definition["properties"])
