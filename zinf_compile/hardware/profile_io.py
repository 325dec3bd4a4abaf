"""Hardware profiles: presets and users' files, read strictly.

A profile is the JSON of a ``Hardware``. Its numbers may have units: ``"12 GB/s"``, ``"70 TFLOP/s"``, ``"32 GiB"``, ``"5
us"``. A lowercase b means bits: ``"100 Gb/s"`` is 12.5 GB/s.
"""

import re
from decimal import Decimal
from pathlib import Path

from zinf_compile.hardware.check import find_problems
from zinf_compile.ir.config import parse_size
from zinf_compile.ir.errors import ConfigError
from zinf_compile.ir.hardware import Hardware
from zinf_compile.ir.records import Reader, RecordError, parse_json, to_json, write_whole
from zinf_compile.ir.user_files import read_regular

_MOST_NBYTES = 2**24  # limit of a file; a profile has some KiB
_PROFILES = Path(__file__).parent / "profiles"
# Decimal, so that "5 us" is exactly the float 5e-6.
_PREFIXES = {"": Decimal(1), "k": Decimal(10**3), "K": Decimal(10**3)}
_PREFIXES |= {prefix: Decimal(1000**power) for power, prefix in enumerate("MGTP", start=2)}
_BINARY = {f"{prefix}i": Decimal(1024**power) for power, prefix in enumerate("KMGT", start=1)}
_UNITS = {
    "bytes per second": {
        **{f"{prefix}B/s": factor for prefix, factor in (_PREFIXES | _BINARY).items()},
        **{f"{prefix}{bits}/s": factor / 8 for prefix, factor in _PREFIXES.items() for bits in ("b", "bit")},
    },
    "FLOP/s": {f"{prefix}{flops}": factor for prefix, factor in _PREFIXES.items() for flops in ("FLOP/s", "FLOPS")},
    "elements per second": {f"{prefix}elements/s": factor for prefix, factor in _PREFIXES.items()},
    "seconds": {
        "h": Decimal(3600),
        "min": Decimal(60),
        "s": Decimal(1),
        "ms": Decimal("1e-3"),
        "us": Decimal("1e-6"),
        "µs": Decimal("1e-6"),
        "ns": Decimal("1e-9"),
    },
}
_EXAMPLES = {
    "bytes per second": "12 GB/s",
    "FLOP/s": "70 TFLOP/s",
    "elements per second": "1.5 G elements/s",
    "seconds": "5 us",
}
_QUANTITY = re.compile(r"\s*(?P<number>-?\d+(?:\.\d*)?(?:[eE][+-]?\d{1,3})?)\s*(?P<unit>.*)")


def preset_names() -> tuple[str, ...]:
    """Return the names of the machines that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _PROFILES.glob("*.json")))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Return a preset by its name, or the profile in a file.

    ConfigError for a name that is neither, and for a file that is damaged, incomplete or implausible; it lists all
    problems.
    """
    preset = _PROFILES / f"{name_or_path}.json"
    is_preset = str(name_or_path) in preset_names()
    path = preset if is_preset else Path(name_or_path)
    try:
        text = read_regular(path, most=_MOST_NBYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"no hardware profile {str(name_or_path)!r}: {error.strerror}; "
            f"give a file, or one of {', '.join(preset_names())}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no hardware profile: byte {error.start} is not UTF-8 text; give a JSON file"
        ) from error
    return parse_hardware(text, source=path.stem if is_preset else str(path))


def parse_hardware(text: str, *, source: str = "the hardware profile") -> Hardware:
    """Return the hardware that JSON text describes; ConfigError naming ``source`` and all fields that are wrong."""
    reader = Reader(read_text=read_quantity, has_defaults=True)
    try:
        hardware = reader.read(parse_json(text), Hardware)
    except RecordError as error:
        raise ConfigError(f"{source} {error}; it must be JSON as `zinf doctor --save FILE` writes it") from error
    problems = list(reader.problems)
    if isinstance(hardware, Hardware):
        problems += find_problems(hardware)
    if problems:
        raise ConfigError(
            f"{source} is no hardware profile that can be used, correct {len(problems)} field(s) of it:", *problems
        )
    assert isinstance(hardware, Hardware)
    return hardware


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a profile that ``load_hardware`` reads; whole or not at all. ConfigError if the path cannot be written."""
    try:
        write_whole(to_json(hardware), Path(path))
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be written to {path}: {error.strerror}; give a file in a folder that can be written"
        ) from error


def read_quantity(field: str, text: str) -> float:
    """Return the number in a text for a field of ``Hardware``; the ValueError says what the field should be."""
    if field.endswith("nbytes"):
        try:
            return parse_size(text, option=field)
        except ConfigError as error:
            raise ValueError("a size such as '32 GiB'") from error
    quantity = _quantity_of(field)
    if quantity is None:
        raise ValueError("a JSON number")
    match = _QUANTITY.fullmatch(text)
    factor = _UNITS[quantity].get(match["unit"].replace(" ", "")) if match else None
    if match is None or factor is None:
        raise ValueError(f"{quantity}, such as {_EXAMPLES[quantity]!r}")
    return float(Decimal(match["number"]) * factor)


def _quantity_of(field: str) -> str | None:
    if field.endswith("bytes_per_second"):
        return "bytes per second"
    if field.endswith("elements_per_second"):
        return "elements per second"
    if field.endswith("per_second"):
        return "FLOP/s"
    return "seconds" if field.endswith("_seconds") else None
