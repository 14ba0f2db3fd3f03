"""Checks a document by a pydantic model, with errors for the person who wrote it.

A field's description says what is right for it, and ends every error about it.
"""

import difflib
from typing import Any, TypeVar, get_args

import pydantic

from pipeline.document import Document, Fault, Place
from pipeline.errors import RequestError

_MOST_FAULTS = 20
_MOST_SHOWN = 60

# What is wrong, by the name that pydantic gives it.
_PROBLEMS = {
    "dict_type": "is not a mapping",
    "finite_number": "is not a finite number",
    "float_type": "is not a number",
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "int_from_float": "is not a whole number",
    "int_type": "is not a whole number",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "list_type": "is not a list",
    "literal_error": "is none of its values",
    "model_type": "is not a mapping",
    "string_pattern_mismatch": "is not of that form",
    "string_too_long": "is too long",
    "string_too_short": "is too short",
    "string_unicode": "holds half a character (a lone surrogate)",
    "string_type": "is not text (put it in quotes if it is meant as text)",
    "too_long": "is too long",
    "too_short": "is too short",
}


class Checked(pydantic.BaseModel):
    """What all models of documents have in common: strict, closed, frozen."""

    model_config = pydantic.ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False
    )


M = TypeVar("M", bound=Checked)


def check(document: Document, model: type[M], more: list[Fault] | None = None) -> M:
    """Returns a document as a model's instance.

    Args:
        document: What was read.
        model: What it must be.
        more: Faults that only the caller can find.

    Raises:
        RequestError: Something is wrong; the message lists every fault with file,
            line, field and remedy, in the order of their lines.
    """
    faults = [*document.faults, *(more or [])]
    try:
        checked = model.model_validate(document.value)
    except pydantic.ValidationError as error:
        for found in error.errors(include_url=False):
            place = found["loc"]
            message = _message(model, place, dict(found))
            faults.append(Fault(document.line(place), place, message))
    else:
        if not faults:
            return checked
    raise faults_error(document, faults)


def faults_error(document: Document, faults: list[Fault]) -> RequestError:
    """Returns the error that lists faults with file, line, field and remedy."""
    return RequestError("\n".join(_lines(document, faults)))


def field_name(place: Place) -> str:
    """Writes a place as people do: clips[1].steps."""
    name = ""
    for part in place:
        plain = isinstance(part, int) or part.isidentifier()
        step = str(part) if plain else repr(shorten(str(part)))
        name += f"[{step}]" if isinstance(part, int) else f".{step}"
    return name.removeprefix(".")


def shorten(text: str) -> str:
    """Cuts a text to what an error has room for."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _lines(document: Document, faults: list[Fault]) -> list[str]:
    # What is inside a key given twice was, in part, given twice with it.
    twice = {fault.place for fault in document.faults}
    kept = [
        fault
        for fault in faults
        if not any(fault.place[:end] in twice for end in range(len(fault.place)))
    ]
    kept.sort(key=lambda fault: fault.line)
    lines = []
    for fault in kept[:_MOST_FAULTS]:
        field = f"{field_name(fault.place)}: " if fault.place else ""
        lines.append(f"{document.source}:{fault.line}: {field}{fault.message}")
    if len(kept) > _MOST_FAULTS:
        lines.append(f"and {len(kept) - _MOST_FAULTS} more")
    return lines


def _message(model: type[Checked], place: Place, found: dict[str, Any]) -> str:
    kind, value = found["type"], found["input"]
    if kind == "value_error":
        return str(found["ctx"]["error"])
    around, right = _expected(model, place)
    if kind == "extra_forbidden":
        known = list(around.model_fields)
        close = difflib.get_close_matches(str(place[-1]), known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"unknown; {hint}Known are {', '.join(known)}"
    if kind == "missing":
        return f"missing; give {right}"
    shown = "this"
    if isinstance(value, str | int | float):
        shown = shorten(repr(value))
    elif value is None:
        shown = "nothing"
    return f"{shown} {_PROBLEMS.get(kind, found['msg'])}; give {right}"


def _expected(model: type[Checked], place: Place) -> tuple[type[Checked], str]:
    """Returns the innermost model that a place leads to, and what is right there."""
    right = _mapping(model)
    for part in place:
        if isinstance(part, int):
            right = _mapping(model)
        elif field := model.model_fields.get(part):
            right = field.description or ""
            inner = (field.annotation, *get_args(field.annotation))
            models = [
                m for m in inner if isinstance(m, type) and issubclass(m, Checked)
            ]
            model = models[0] if models else model
    return model, right


def _mapping(model: type[Checked]) -> str:
    needed = [name for name, field in model.model_fields.items() if field.is_required()]
    return f"a mapping with {', '.join(needed or model.model_fields)}"
