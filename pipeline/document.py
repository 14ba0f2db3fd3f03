"""Reads YAML and JSON that people write, with the line of every value.

The files are untrusted: size and depth are bounded, nothing in them expands, and no
value becomes anything but text, a number, true, false or null. Plain YAML values
follow the core schema of YAML 1.2, so that `no` and `12:30` stay text.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import RequestError

# Room for 10,000 clips with prompts of 400 letters each.
MOST_BYTES = 4 * 2**20
_MOST_DEPTH = 16
# The largest number that any field takes has ten digits.
_MOST_DIGITS = 40

# YAML and JSON hold no other control characters as they are (YAML 1.2, 5.1).
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOLEAN = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_JSON_TOKEN = re.compile(r'\n|"(?:[^"\\]|\\.)*"|[{}\[\],]|[^\s{}\[\],:"]+')

# Written in C where PyYAML was built so: ten times as fast.
_Loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)

Place = tuple[str | int, ...]
"""The keys and indices that lead to a value."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that is wrong in a document: where, what, what would be right."""

    line: int
    place: Place
    message: str


class Document:
    """A file's content as plain data, and the line of each of its values.

    Attributes:
        source: The file's path, as it was given.
        value: The content.
        faults: Keys that are given twice.
    """

    def __init__(self, source: Path):
        self.source = source
        self.value: Any = None
        self.faults: list[Fault] = []
        self.lines: dict[Place, int] = {(): 1}

    def line(self, place: Place) -> int:
        """Returns the line of a value, or of the nearest one around it."""
        while place not in self.lines:
            place = place[:-1]
        return self.lines[place]

    def add(self, place: Place, line: int) -> None:
        """Notes a value's line, or a fault where the place is taken already."""
        if place in self.lines:
            message = f"given twice, first on line {self.lines[place]}; keep one"
            self.faults.append(Fault(line, place, message))
        else:
            self.lines[place] = line

    def error(self, line: int, message: str) -> RequestError:
        """Returns the error that says what is wrong in a line."""
        return RequestError(f"{self.source}:{line}: {message}")


def read_document(source: Path) -> Document:
    """Reads a file: JSON where its name ends in .json, YAML else.

    Raises:
        RequestError: The file cannot be read, is too large, not UTF-8, neither YAML
            nor JSON, empty, nested too deeply, or uses aliases, anchors or tags.
    """
    document = Document(source)
    text = _read_text(document)
    if source.suffix.lower() == ".json":
        _read_json(document, text)
    else:
        _read_yaml(document, text)
    return document


def _read_text(document: Document) -> str:
    source = document.source
    try:
        with open(source, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RequestError(
            f"{source} cannot be read: {error.strerror}; give the path of a file"
        ) from error
    if len(data) > MOST_BYTES:
        raise RequestError(
            f"{source} has more than {MOST_BYTES // 2**20} MiB; split it into several"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise document.error(
            line, f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if control := _CONTROL.search(text):
        line = text.count("\n", 0, control.start()) + 1
        raise document.error(
            line, f"holds the control character {control[0]!r}; remove it"
        )
    if not text.strip():
        raise document.error(1, "the file is empty; see configs/manifests/demo.yaml")
    return text


def _read_yaml(document: Document, text: str) -> None:
    try:
        _refuse_tricks(document, text)
        # After that check, composing meets neither depth nor aliases.
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # What is missing at the end is found on a line that is not there.
        last = text.rstrip().count("\n") + 1
        raise document.error(
            min(mark.line + 1, last) if mark else 1,
            f"not YAML: {error.problem or error.context}; indent with spaces only, and "
            'put texts that hold ": " or "#" in quotes',
        ) from error
    except yaml.YAMLError as error:
        raise document.error(1, f"not YAML: {error}") from error
    document.value = _value(document, node, ())


def _refuse_tricks(document: Document, text: str) -> None:
    """Refuses what makes a small file large or strange, before anything is built."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise document.error(
                line,
                "YAML anchors and aliases (&name, *name) are not read; write the value "
                "out, or put what clips share in `defaults`",
            )
        if getattr(event, "tag", None):
            raise document.error(
                line, f"YAML tags ({event.tag}) are not read; write the plain value"
            )
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise document.error(
                    line, "a second document begins here (---); give it a file"
                )
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise document.error(line, f"nested deeper than {_MOST_DEPTH} levels")


def _value(document: Document, node: yaml.Node | None, place: Place) -> Any:
    """Returns a node as plain data, and notes the lines of all that it holds."""
    if isinstance(node, yaml.MappingNode):
        mapping = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise document.error(line, "a key must be plain text")
            inner = (*place, key_node.value)
            document.add(inner, line)
            mapping[key_node.value] = _value(document, value_node, inner)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            document.add((*place, index), item.start_mark.line + 1)
            items.append(_value(document, item, (*place, index)))
        return items
    if isinstance(node, yaml.ScalarNode):
        # Quoted and block texts are text whatever they look like.
        return node.value if node.style else _plain(node.value)
    return None


def _plain(text: str) -> Any:
    if _NULL.fullmatch(text):
        return None
    if boolean := _BOOLEAN.fullmatch(text):
        return boolean[1] is not None
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _integer(digits: str) -> int:
    """Returns a whole number; one with too many digits is cut, and still too large."""
    return int(digits[:_MOST_DIGITS])


def _read_json(document: Document, text: str) -> None:
    try:
        document.value = json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise document.error(
            error.lineno, f"not JSON: {error.msg} (column {error.colno})"
        ) from error
    except RecursionError as error:
        raise document.error(1, f"nested deeper than {_MOST_DEPTH} levels") from error
    _note_json_lines(document, text)


def _note_json_lines(document: Document, text: str) -> None:
    """Walks the tokens of JSON that is known to be well-formed.

    The decoder of the standard library keeps no lines, and quietly takes the last of
    two equal keys.
    """
    line = 1
    # Of each open object the latest key, of each open array the latest index.
    place: list[str | int] = []
    want_key = False
    for match in _JSON_TOKEN.finditer(text):
        token = match[0]
        if token == "\n":
            line += 1
        elif token in "}]":
            place.pop()
            want_key = False
        elif token == ",":
            want_key = isinstance(place[-1], str)
        elif want_key:
            place[-1] = json.loads(token)
            document.add(tuple(place), line)
            want_key = False
        else:
            if place and isinstance(place[-1], int):
                place[-1] += 1
                document.add(tuple(place), line)
            if token in "{[":
                want_key = token == "{"
                place.append("" if want_key else -1)
                if len(place) > _MOST_DEPTH:
                    raise document.error(
                        line, f"nested deeper than {_MOST_DEPTH} levels"
                    )
