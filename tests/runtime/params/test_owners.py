"""The fields of a stored parameter's owners are written only in the file of their class."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import zinf_compile
from zinf_compile.runtime.params.copies import Copies, Seat
from zinf_compile.runtime.params.gradient_state import GradientState
from zinf_compile.runtime.params.records import StoredParameter
from zinf_compile.runtime.params.update_state import UpdateState

_PACKAGE = Path(zinf_compile.__file__).parent
_FOLDERS = ("runtime", "driver", "frontend", "checkpoint", "weights")
_SEAT_FIELDS = frozenset({"anchor", "is_held"})
_OWNERS = {  # attribute of a record: the fields of that owner
    "copies": frozenset(each.name for each in fields(Copies)),
    "gradient": frozenset(each.name for each in fields(GradientState)),
    "update": frozenset(each.name for each in fields(UpdateState)),
    "seat": _SEAT_FIELDS,
}
_MUTATORS = frozenset(
    [
        "add",
        "append",
        "clear",
        "difference_update",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "setdefault",
        "sort",
        "update",
    ]
)


def written_elsewhere(source: str) -> list[str]:
    """Return the owners' fields that some code writes through a record: sets, deletes or changes in place."""
    tree = ast.parse(source)
    aliases = {  # local names for an owner: ``copies, gradient = record.copies, record.gradient``
        name: owner
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target, value in _pairs(node.targets[0], node.value)
        if isinstance(target, ast.Name) and (owner := _owner_in(value, {})) is not None
        for name in [target.id]
    }

    def field_in(node: ast.expr) -> str | None:
        """Return the field that an expression is, or is a part of."""
        while isinstance(node, ast.Subscript):
            node = node.value
        if not isinstance(node, ast.Attribute):
            return None
        owner = _owner_in(node.value, aliases)
        if owner is None or node.attr not in _OWNERS[owner]:
            return None
        return f"{owner}.{node.attr} in line {node.lineno}"

    written = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [part for target in node.targets for part in _parts(target)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            targets = [node.func.value]
        written += [field for target in targets if (field := field_in(target)) is not None]
    return written


def _owner_in(node: ast.expr, aliases: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    return node.attr if isinstance(node, ast.Attribute) and node.attr in _OWNERS else None


def _parts(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [part for each in target.elts for part in _parts(each)]
    return [target]


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def test_seat_fields_are_known() -> None:
    assert vars(Seat(anchor=None)).keys() == _SEAT_FIELDS  # type: ignore[arg-type]


def test_a_record_has_its_owners_and_nothing_else_that_changes() -> None:
    assert {each.name for each in fields(StoredParameter)} == {
        *("param", "name", "parameter", "shape", "views", "store", "dtype"),
        *("copies", "gradient", "update"),
    }


@pytest.mark.parametrize(
    "line",
    [
        "record.update.is_torn = True",
        "job.record.update.count += 1",
        "a, record.copies.master = 1, slot",
        "record.copies.states[key] = slot",
        "record.gradient.norms.clear()",
        "del record.gradient.rows_home[0]",
        "record.copies.seat.is_held = True",
        "state = record.gradient\nstate.deferred.append(1)",
    ],
)
def test_a_write_is_found(line: str) -> None:
    assert len(written_elsewhere(line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "slot = record.copies.master",
        "record.update.begin(future)",
        "job.update = 1",
        "record.copies.put_state(key, slot)",
    ],
)
def test_a_read_or_a_call_is_none(line: str) -> None:
    assert written_elsewhere(line) == []


@pytest.mark.parametrize("folder", _FOLDERS)
def test_only_the_owners_file_writes_its_fields(folder: str) -> None:
    files = sorted((_PACKAGE / folder).resolve().rglob("*.py"))
    assert files, "the folder has moved"
    written = {file.name: found for file in files if (found := written_elsewhere(file.read_text()))}
    written.pop("copies.py", None)  # the owner of the seat writes it by name
    assert written == {}
