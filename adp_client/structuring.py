"""The door for configuration: plain data (TOML, JSON) in, frozen types out, or every problem at once.

cattrs alone would make True of "false" and "3" of 3; here a value has the type that the field names, exactly
(an int may stand for a float). Unknown keys are problems. Each problem is `"text @ $.path"`.
"""

import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
from cattrs import ClassValidationError, Converter, transform_error
from cattrs.errors import AttributeValidationNote, BaseValidationError

from .protocol.errors import ConfigError

T = TypeVar("T")

_NAMES = {bool: "true or false", int: "a whole number", str: "text", float: "a number", bytes: "bytes"}


#: Values are shown as far as a person reads them: one that is nested too deeply for `repr` is wrong as well.
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 200
_SHOWN.maxlong = 40


def _shown(value: Any) -> str:
    try:
        return _SHOWN.repr(value)
    except ValueError:  # an integer with more digits than Python writes
        return "a number of very many digits"


class _Problem(ValueError):
    """A sentence for the user."""


def _exact(value: Any, cls: type[Any]) -> Any:
    if type(value) is not cls:
        raise _Problem(f"expected {_NAMES[cls]}, not {_shown(value)}")
    return value


def _number(value: Any, _: type[float]) -> float:
    if type(value) not in (int, float) or value != value or value in (float("inf"), float("-inf")):
        raise _Problem(f"expected a number, not {_shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise _Problem("expected a number, not one beyond every float") from None


def _optional(converter: Converter, value: Any, cls: Any) -> Any:
    if value is None:
        return None
    inner = [arg for arg in typing.get_args(cls) if arg is not type(None)]
    return converter.structure(value, inner[0])


def _is_table(cls: Any) -> bool:
    return typing.get_origin(cls) is dict


def _is_optional(cls: Any) -> bool:
    return (
        typing.get_origin(cls) in (typing.Union, types.UnionType)
        and len(typing.get_args(cls)) == 2
        and type(None) in typing.get_args(cls)
    )


def _structure_attrs(converter: Converter, value: Any, cls: Any) -> Any:
    """Every field is structured and validated by itself, so that one problem does not hide the next."""
    if not isinstance(value, Mapping):
        raise _Problem(f"expected a table of settings, not {_shown(value)}")
    fields = {field.name: field for field in attrs.fields(attrs.resolve_types(cls)) if field.init}
    errors: list[Exception] = []
    found: dict[str, Any] = {}

    def fail(problem: Exception, name: str, kind: Any) -> None:
        problem.__notes__ = [*getattr(problem, "__notes__", ()), AttributeValidationNote("", str(name), kind)]
        errors.append(problem)

    for name in value:
        if name not in fields:
            allowed = ", ".join(sorted(fields))
            fail(_Problem(f"unknown key (allowed: {allowed})"), name, None)
    for name, field in fields.items():
        if name not in value:
            if field.default is attrs.NOTHING:
                fail(_Problem("required, and missing"), name, field.type)
            continue
        try:
            found[name] = converter.structure(value[name], field.type)
            if field.validator is not None:
                field.validator(None, field, found[name])
        except (ValueError, TypeError, BaseValidationError) as exc:
            # What a repr must not show, no problem may show: both end up in logs.
            is_told = field.repr or not any(
                text in str(exc) for text in (_shown(value[name]), str(value[name]))
            )
            fail(exc if is_told else _Problem("not of the right kind (it is not shown)"), name, field.type)
    if errors:
        raise _group(errors, cls)
    made = cls(**found)
    between = [_Problem(text) for text in made.problems()] if hasattr(made, "problems") else []
    if between:
        raise _group(between, cls)
    return made


def _table(structured: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """For tables whose keys are names: cattrs would fail without a sentence on what is none."""

    def hook(value: Any, cls: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _Problem(f"expected a table, not {value!r}")
        return structured(value, cls)

    return hook


def _group(errors: Sequence[Exception], cls: type) -> ClassValidationError:
    return ClassValidationError("", errors, cls)  # pyright: ignore[reportCallIssue]


def _describe(exc: BaseException, _kind: type | None) -> str:
    text = str(exc.args[0]) if exc.args else str(exc)
    return re.sub(r"^'(\w+)' must be ", r"\1 must be ", text)


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for plain in (bool, int, str, bytes):
        converter.register_structure_hook(plain, _exact)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook_func(
        attrs.has, lambda value, cls: _structure_attrs(converter, value, cls)
    )
    converter.register_structure_hook_factory(
        _is_table, lambda cls: _table(converter.gen_structure_mapping(cls))
    )
    converter.register_structure_hook_func(_is_optional, lambda value, cls: _optional(converter, value, cls))
    return converter


_CONVERTER = _make_converter()


def structure(raw: object, cls: type[T]) -> T:
    """Make a `cls` of plain data. Raises ConfigError whose `problems` lists everything that is wrong."""
    try:
        return _CONVERTER.structure(raw, cls)
    except BaseValidationError as exc:
        raise ConfigError(tuple(transform_error(exc, format_exception=_describe))) from None
    except (ValueError, TypeError) as exc:
        raise ConfigError((f"{_describe(exc, None)} @ $",)) from None
