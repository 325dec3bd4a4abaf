"""Plans as JSON, driven by the type hints of the plan's dataclasses: no class is named here but Plan itself.

One record stands on one line, fields in the order of the class, so equal plans are equal bytes and two files diff well.
What is read is checked field by field: nothing unknown, nothing missing, nothing of another type.
"""

import inspect
import json
import math
import os
import types
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, Union, get_args, get_origin, get_type_hints

from zinf_compile.errors import ConfigError, PlanFileError
from zinf_compile.plans import PLAN_VERSION, Plan

# A type hint of a field; typing has no narrower name that covers classes, unions and tuple[...] alike.
_Hint: TypeAlias = Any
_SCALARS: dict[_Hint, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_REMEDY = "save the plan again"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON; the file appears whole or not at all. ConfigError if the path cannot be written."""
    path = Path(path)
    text = plan_to_json(plan)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        try:
            with aside.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the plan cannot be written to {path}: {error.strerror}; give a file in a folder that can be written"
        ) from error


def load_plan(path: str | Path) -> Plan:
    """Return the plan saved at ``path``.

    ConfigError if the file cannot be read, PlanFileError if it is damaged or of another version.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(f"the plan {path} cannot be read: {error.strerror}; give a file that save wrote") from error
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{path} is not a plan: byte {error.start} is not UTF-8 text; {_REMEDY}") from error
    return plan_from_json(text, source=str(path))


def plan_to_json(plan: Plan) -> str:
    """Return a plan as JSON text, the same for equal plans; PlanFileError for a number JSON does not have."""
    return _write(_encode(plan, Plan, ""), depth=0) + "\n"


def plan_from_json(text: str, *, source: str = "the plan") -> Plan:
    """Return the plan that ``text`` describes; PlanFileError naming ``source`` and the field that is wrong."""
    try:
        document = json.loads(text, object_pairs_hook=_make_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise PlanFileError(f"{source} is damaged at {where}: {error.msg}; {_REMEDY}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a repeated field, endless nesting
        raise PlanFileError(f"{source} is damaged: {error}; {_REMEDY}") from error
    try:
        if isinstance(document, dict):
            _check_version(document)
        plan: Plan = _decode(document, Plan, "")
    except PlanFileError as error:
        raise PlanFileError(f"{source} {error}") from None
    return plan


def plan_schema() -> dict[str, object]:
    """Return the JSON schema (draft 2020-12) of plan files, generated from the dataclasses."""
    definitions: dict[str, object] = {}
    root = _describe(Plan, definitions)
    plan = definitions[Plan.__name__]
    assert isinstance(plan, dict)
    plan["properties"]["version"] = {"const": PLAN_VERSION}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"zinf_compile plan, version {PLAN_VERSION}",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def plan_schema_text() -> str:
    """Return the text of ``plan_schema.json``."""
    return json.dumps(plan_schema(), indent=2) + "\n"


@cache
def _fields(record: type) -> Mapping[str, _Hint]:
    """Return the fields of a dataclass with their resolved types, in order."""
    hints = get_type_hints(record)
    return {name: hints[name] for name in record.__dataclass_fields__}  # type: ignore[attr-defined]  # a dataclass


def _is_union(hint: _Hint) -> bool:
    return _origin(hint) in (types.UnionType, Union)


def _is_tuple(hint: _Hint) -> bool:
    return _origin(hint) is tuple


def _origin(hint: _Hint) -> object:
    return get_origin(hint)


def _tuple_items(hint: _Hint, length: int) -> tuple[_Hint, ...] | None:
    """Return the types of a tuple's items, or None if it cannot have that length."""
    items = get_args(hint)
    if len(items) == 2 and items[1] is Ellipsis:
        return (items[0],) * length
    return items if len(items) == length else None


def _encode(value: Any, hint: _Hint, path: str) -> Any:
    """Return what JSON holds for a value of a field's type."""
    if _is_union(hint):
        return None if value is None else _encode(value, _without_none(hint), path)
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
            raise PlanFileError(f"the plan cannot be written: {path} is {value}, JSON has finite numbers only")
        return float(value) + 0.0  # equal plans are equal bytes: 1 is 1.0 and -0.0 is 0.0
    return value.value if isinstance(value, StrEnum) else value


def _decode(found: object, hint: _Hint, path: str) -> Any:
    """Return the value of a field's type that JSON holds; PlanFileError naming the field path."""
    if _is_union(hint):
        return None if found is None else _decode(found, _without_none(hint), path)
    if _is_tuple(hint):
        return _decode_tuple(found, hint, path)
    if is_dataclass(hint):
        return _decode_record(found, hint, path)  # type: ignore[arg-type]  # is_dataclass of a hint is a class
    if issubclass(hint, StrEnum):
        if not isinstance(found, str) or found not in {member.value for member in hint}:
            raise _wrong(path, found, f"one of {', '.join(member.value for member in hint)}")
        return hint(found)
    # bool is an int to Python; a plan keeps them apart
    if hint is float and type(found) is int:
        try:
            return float(found)
        except OverflowError:
            raise _wrong(path, found, "a finite number") from None
    if type(found) is not hint:
        raise _wrong(path, found, f"a JSON {_SCALARS[hint]}")
    if isinstance(found, float) and not math.isfinite(found):
        raise _wrong(path, found, "a finite number")
    return found


def _decode_tuple(found: object, hint: _Hint, path: str) -> tuple[Any, ...]:
    if not isinstance(found, list):
        raise _wrong(path, found, "a JSON array")
    items = _tuple_items(hint, len(found))
    if items is None:
        raise _wrong(path, found, f"an array of {len(get_args(hint))} items")
    return tuple(
        _decode(item, item_hint, f"{path}[{index}]")
        for index, (item, item_hint) in enumerate(zip(found, items, strict=True))
    )


def _decode_record(found: object, record: type, path: str) -> Any:
    if not isinstance(found, dict):
        raise _wrong(path, found, f"a JSON object ({record.__name__})")
    fields = _fields(record)
    for name in found:
        if name not in fields:
            raise PlanFileError(
                f"has an unknown field {_join(path, name)}; {record.__name__} has {', '.join(fields)}; {_REMEDY}"
            )
    for name in fields:
        if name not in found:
            raise PlanFileError(f"lacks the field {_join(path, name)}; {_REMEDY}")
    return record(**{name: _decode(found[name], field, _join(path, name)) for name, field in fields.items()})


def _check_version(document: Mapping[str, object]) -> None:
    version = document.get("version", PLAN_VERSION)  # a missing one is reported as a missing field
    if type(version) is not int or version != PLAN_VERSION:
        raise PlanFileError(
            f"has version {_shorten(version)}, this zinf_compile understands version {PLAN_VERSION}; "
            "plan again with this version, or read the file with the version that wrote it"
        )


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {repeated} is given twice")
    return made


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a finite number")


def _wrong(path: str, found: object, expected: str) -> PlanFileError:
    return PlanFileError(f"is damaged at {path or 'its root'}: {_shorten(found)} is not {expected}; {_REMEDY}")


def _shorten(found: object) -> str:
    if isinstance(found, dict | list):
        return "an object" if isinstance(found, dict) else f"an array of {len(found)}"
    text = json.dumps(found)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _without_none(hint: _Hint) -> _Hint:
    """Return ``X`` of ``X | None``, the only unions a plan has."""
    (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
    return inner


def _write(value: object, *, depth: int) -> str:
    """Return JSON text: the plan's fields and the records of its arrays one to a line, everything below compact."""
    if depth == 0 and isinstance(value, dict):
        lines = (f"{json.dumps(name)}: {_write(field, depth=1)}" for name, field in value.items())
        return _wrap("{", lines, "}", indent="")
    if depth == 1 and isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return _wrap("[", (_write(item, depth=2) for item in value), "]", indent=" ")
    return json.dumps(value, allow_nan=False)


def _wrap(opening: str, lines: Iterator[str], closing: str, *, indent: str) -> str:
    body = ",\n".join(f"{indent} {line}" for line in lines)
    return f"{opening}\n{body}\n{indent}{closing}"


def _describe(hint: _Hint, definitions: dict[str, object]) -> dict[str, object]:
    """Return the schema of a type; records and enums go to ``definitions`` and are referred to."""
    if _is_union(hint):
        return {"anyOf": [_describe(arg, definitions) for arg in get_args(hint)]}
    if _is_tuple(hint):
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return {"type": "array", "items": _describe(items[0], definitions)}
        return {
            "type": "array",
            "prefixItems": [_describe(item, definitions) for item in items],
            "items": False,
            "minItems": len(items),
        }
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # taken, should the type refer to itself
        definitions[hint.__name__] = {"description": inspect.getdoc(hint), **_describe_named(hint, definitions)}
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _describe_named(hint: _Hint, definitions: dict[str, object]) -> dict[str, object]:
    if not is_dataclass(hint):
        return {"enum": [member.value for member in hint]}
    fields = _fields(hint)  # type: ignore[arg-type]  # is_dataclass of a hint is a class
    return {
        "type": "object",
        "properties": {name: _describe(field, definitions) for name, field in fields.items()},
        "required": list(fields),
        "additionalProperties": False,
    }
