"""Plans as JSON: read strictly, and of this version only."""

import json
from collections.abc import Mapping
from pathlib import Path

from zinf_compile.ir.errors import ConfigError, PlanFileError
from zinf_compile.ir.plan import PLAN_VERSION, Plan
from zinf_compile.ir.plan_check import find_nonsense
from zinf_compile.ir.records import Reader, RecordError, describe, parse_json, shorten, to_json, write_whole
from zinf_compile.ir.user_files import read_regular

_REMEDY = "save the plan again"
_MOST_NBYTES = 2**28  # of a file; the plan of a model with thousands of parameters has about a MiB


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON; the file appears whole or not at all. ConfigError if the path cannot be written."""
    text = plan_to_json(plan)
    try:
        write_whole(text, Path(path))
    except OSError as error:
        raise ConfigError(
            f"the plan cannot be written to {path}: {error.strerror}; give a file in a folder that can be written"
        ) from error


def load_plan(path: str | Path) -> Plan:
    """Return the plan saved at ``path``.

    ConfigError if the file cannot be read, PlanFileError if it is damaged or of another version.
    """
    try:
        text = read_regular(path, most=_MOST_NBYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"the plan {path} cannot be read: {error.strerror}; give a file that save wrote") from error
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{path} is not a plan: byte {error.start} is not UTF-8 text; {_REMEDY}") from error
    plan = plan_from_json(text, source=str(path))
    if (problem := find_nonsense(plan)) is not None:
        raise PlanFileError(f"{path} {problem}; {_REMEDY}")
    return plan


def plan_to_json(plan: Plan) -> str:
    """Return a plan as JSON text, the same for equal plans; PlanFileError for a number JSON does not have."""
    try:
        return to_json(plan)
    except RecordError as error:
        raise PlanFileError(f"the plan {error}") from error


def plan_from_json(text: str, *, source: str = "the plan") -> Plan:
    """Return the plan that ``text`` describes; PlanFileError naming ``source`` and the field that is wrong."""
    reader = Reader()
    try:
        document = parse_json(text)
    except RecordError as error:
        raise PlanFileError(f"{source} {error}; {_REMEDY}") from error
    if isinstance(document, dict):
        _check_version(document, source)
    plan: Plan = reader.read(document, Plan)
    if reader.problems:
        raise PlanFileError(f"{source} {reader.problems[0]}; {_REMEDY}")
    return plan


def plan_schema() -> dict[str, object]:
    """Return the JSON schema (draft 2020-12) of plan files, generated from the dataclasses."""
    definitions: dict[str, object] = {}
    root = describe(Plan, definitions)
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


def _check_version(document: Mapping[str, object], source: str) -> None:
    if "version" not in document:
        raise PlanFileError(f"{source} is not a zinf plan file (missing 'version'); give a file that plan.save wrote")
    version = document["version"]
    if type(version) is not int or version != PLAN_VERSION:
        raise PlanFileError(
            f"{source} has version {shorten(version)}, this zinf_compile understands version {PLAN_VERSION}; "
            "plan again with this version, or read the file with the version that wrote it"
        )
