"""JSON <-> frozen dataclasses, strictly: unknown, missing or mistyped keys are refused."""

import dataclasses
import types
import typing
from typing import Any, TypeVar

from specrun.engines.errors import SpecrunError

T = TypeVar("T")


class SchemaError(SpecrunError):
    """A JSON document does not have the declared shape."""


def to_json(value: Any) -> Any:
    """Plain JSON values for a (nested) dataclass instance."""
    return dataclasses.asdict(value)


def from_json(cls: type[T], data: Any, where: str) -> T:
    """Build dataclass `cls` from parsed JSON.

    `where` names the document in messages. Raises SchemaError for any key or type that `cls` does not
    declare, and for any declared key that is missing.
    """
    if not isinstance(data, dict):
        raise SchemaError(f"{where}: got {type(data).__name__}, expected an object")
    hints = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type] # T is a dataclass
    unknown = sorted(set(data) - set(fields))
    missing = [name for name in fields if name not in data]
    if unknown or missing:
        raise SchemaError(
            f"{where}: unknown keys {unknown}, missing keys {missing}; "
            f"it was written by another version of specrun or edited: rebuild it"
        )
    return cls(**{name: _value(hints[name], data[name], f"{where}: {name}") for name in fields})


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        inner = [argument for argument in arguments if argument is not type(None)]
        return None if data is None else _value(inner[0], data, where)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), data, where)
    if origin is tuple:
        _expect(list, data, where)
        return tuple(_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is dict:
        _expect(dict, data, where)
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    _expect(hint, data, where)
    return data


def _expect(kind: type, data: Any, where: str) -> None:
    if type(data) is not kind:  # exactly: JSON true is no integer here
        raise SchemaError(f"{where}: got {type(data).__name__} ({data!r:.60}), expected {kind.__name__}")
