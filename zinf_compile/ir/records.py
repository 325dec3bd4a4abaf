"""Dataclasses as JSON, driven by their type hints: strict to read, and the same bytes for equal records.

A record is a frozen dataclass of numbers, text, enums, records and tuples of these. One record stands on one line, fields in
the order of the class, so two files diff well. What is read is checked field by field: nothing unknown, nothing missing,
nothing of another type. All that is wrong is told, not only the first.
"""

import inspect
import json
import math
import os
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from dataclasses import fields as dataclass_fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, Union, get_args, get_origin, get_type_hints

# A type hint of a field; typing has no narrower name that covers classes, unions and tuple[...] alike.
Hint: TypeAlias = Any
_SCALARS: dict[Hint, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}

GAP: Final = object()
"""Stands in a record for what could not be read, so that the rest can be judged as well."""


class RecordError(ValueError):
    """What is wrong with a file's text, to be continued behind its name: ``"is damaged at line 3 column 1: ..."``."""


def write_whole(text: str, path: Path) -> None:
    """Write a file that appears whole or not at all. OSError if the path cannot be written."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with aside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def to_json(record: object) -> str:
    """Return a record as JSON text, the same for equal records; RecordError for a number JSON does not have."""
    return _write(_encode(record, type(record), ""), depth=0) + "\n"


def parse_json(text: str) -> object:
    """Return the JSON document of ``text``; RecordError for text that is none, or gives a field twice."""
    try:
        return json.loads(text, object_pairs_hook=_make_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise RecordError(f"is damaged at line {error.lineno} column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a repeated field, endless nesting
        raise RecordError(f"is damaged: {error}") from error


@cache
def _fields(record: type) -> Mapping[str, Hint]:
    """Return the fields of a dataclass with their resolved types, in order, without those excluded from comparison."""
    hints = get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclass_fields(record)}


def _is_union(hint: Hint) -> bool:
    return _origin(hint) in (types.UnionType, Union)


def _is_tuple(hint: Hint) -> bool:
    return _origin(hint) is tuple


def _origin(hint: Hint) -> object:
    return get_origin(hint)


def _tuple_items(hint: Hint, length: int) -> tuple[Hint, ...] | None:
    """Return the types of a tuple's items, or None if it cannot have that length."""
    items = get_args(hint)
    if len(items) == 2 and items[1] is Ellipsis:
        return (items[0],) * length
    return items if len(items) == length else None


def _encode(value: Any, hint: Hint, path: str) -> Any:
    """Return what JSON holds for a value of a field's type."""
    if _is_union(hint):
        return None if value is None else _encode(value, _member(hint, is_record=is_dataclass(value)), path)
    if _is_tuple(hint):
        items = _tuple_items(hint, len(value)) or ()
        return [
            _encode(item, item_hint, f"{path}[{index}]")
            for index, (item, item_hint) in enumerate(zip(value, items, strict=True))
        ]
    if is_dataclass(hint):
        return {
            name: _encode(getattr(value, name), field, _join(path, name))
            for name, field in _fields(hint).items()  # type: ignore[arg-type]  # is_dataclass of a hint is a class
        }
    if hint is float:
        if not math.isfinite(value):
            raise RecordError(f"cannot be written: {path} is {value}, JSON has finite numbers only")
        return float(value) + 0.0  # equal plans are equal bytes: 1 is 1.0 and -0.0 is 0.0
    return value.value if isinstance(value, StrEnum) else value


class Reader:
    """Reads JSON values as records and collects what is wrong, each as a sentence without its end.

    ``read_text`` turns text that stands where a number should into one, by the name of the field (``"12 GB/s"``), or
    raises ValueError. ``has_defaults`` lets a file leave out fields for which the class has a default.
    """

    def __init__(self, *, read_text: Callable[[str, str], float] | None = None, has_defaults: bool = False) -> None:
        self.problems: list[str] = []
        self._read_text = read_text
        self._has_defaults = has_defaults

    def read(self, found: object, hint: Hint, path: str = "") -> Any:
        """Return the value of a type that JSON holds; GAP, and a problem, where it holds another."""
        if _is_union(hint):
            return None if found is None else self.read(found, _member(hint, is_record=isinstance(found, dict)), path)
        if _is_tuple(hint):
            return self._read_tuple(found, hint, path)
        if is_dataclass(hint):
            return self._read_record(found, hint, path)  # type: ignore[arg-type]  # is_dataclass of a hint is a class
        if issubclass(hint, StrEnum):
            if not isinstance(found, str) or found not in {member.value for member in hint}:
                return self._wrong(path, found, f"one of {', '.join(member.value for member in hint)}")
            return hint(found)
        if self._read_text is not None and isinstance(found, str) and hint in (int, float):
            try:
                number = self._read_text(path.rpartition(".")[2], found)
            except ValueError as error:
                return self._wrong(path, found, str(error))
            found = int(number) if hint is int else float(number)
        # bool is an int to Python; a record keeps them apart
        if hint is float and type(found) is int:
            try:
                return float(found)
            except OverflowError:
                return self._wrong(path, found, "a finite number")
        if type(found) is not hint:
            return self._wrong(path, found, f"a JSON {_SCALARS[hint]}")
        if isinstance(found, float) and not math.isfinite(found):
            return self._wrong(path, found, "a finite number")
        return found

    def _read_tuple(self, found: object, hint: Hint, path: str) -> Any:
        if not isinstance(found, list):
            return self._wrong(path, found, "a JSON array")
        items = _tuple_items(hint, len(found))
        if items is None:
            return self._wrong(path, found, f"an array of {len(get_args(hint))} items")
        return tuple(
            self.read(item, item_hint, f"{path}[{index}]")
            for index, (item, item_hint) in enumerate(zip(found, items, strict=True))
        )

    def _read_record(self, found: object, record: type, path: str) -> Any:
        if not isinstance(found, dict):
            return self._wrong(path, found, f"a JSON object ({record.__name__})")
        hints = _fields(record)
        for name in found:
            if name not in hints:
                self.problems.append(
                    f"has an unknown field {_join(path, name)}; {record.__name__} has {', '.join(hints)}"
                )
        values = {}
        for field in dataclass_fields(record):
            if field.name not in found and not (self._has_defaults and field.default is not MISSING):
                self.problems.append(f"lacks the field {_join(path, field.name)}")
                values[field.name] = GAP
        values |= {
            name: self.read(found[name], hint, _join(path, name)) for name, hint in hints.items() if name in found
        }
        return record(**values)

    def _wrong(self, path: str, found: object, expected: str) -> Any:
        self.problems.append(f"is damaged at {path or 'its root'}: {shorten(found)} is not {expected}")
        return GAP


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {repeated} is given twice")
    return made


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a finite number")


def shorten(found: object) -> str:
    """Return a JSON value as an error shows it."""
    if isinstance(found, dict | list):
        return "an object" if isinstance(found, dict) else f"an array of {len(found)}"
    text = json.dumps(found)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _member(hint: Hint, *, is_record: bool) -> Hint:
    """Return the type of a value in a union beside None: of two, one is a record, and the other is not."""
    members = [member for member in get_args(hint) if member is not type(None)]
    return next((member for member in members if is_dataclass(member) == is_record), members[0])


def _write(value: object, *, depth: int) -> str:
    """Return JSON text: fields of the outermost record and records of its arrays one to a line, the rest compact."""
    if depth == 0 and isinstance(value, dict):
        lines = (f"{json.dumps(name)}: {_write(field, depth=1)}" for name, field in value.items())
        return _wrap("{", lines, "}", indent="")
    if depth == 1 and isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return _wrap("[", (_write(item, depth=2) for item in value), "]", indent=" ")
    return json.dumps(value, allow_nan=False)


def _wrap(opening: str, lines: Iterator[str], closing: str, *, indent: str) -> str:
    body = ",\n".join(f"{indent} {line}" for line in lines)
    return f"{opening}\n{body}\n{indent}{closing}"


def describe(hint: Hint, definitions: dict[str, object]) -> dict[str, object]:
    """Return the schema of a type; records and enums go to ``definitions`` and are referred to."""
    if _is_union(hint):
        return {"anyOf": [describe(arg, definitions) for arg in get_args(hint)]}
    if _is_tuple(hint):
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return {"type": "array", "items": describe(items[0], definitions)}
        return {
            "type": "array",
            "prefixItems": [describe(item, definitions) for item in items],
            "items": False,
            "minItems": len(items),
        }
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # taken, should the type refer to itself
        definitions[hint.__name__] = {"description": inspect.getdoc(hint), **_describe_named(hint, definitions)}
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _describe_named(hint: Hint, definitions: dict[str, object]) -> dict[str, object]:
    if not is_dataclass(hint):
        return {"enum": [member.value for member in hint]}
    fields = _fields(hint)  # type: ignore[arg-type]  # is_dataclass of a hint is a class
    return {
        "type": "object",
        "properties": {name: describe(field, definitions) for name, field in fields.items()},
        "required": list(fields),
        "additionalProperties": False,
    }
