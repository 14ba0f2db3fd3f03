import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.document import MOST_BYTES, read_document
from pipeline.errors import RequestError

# As they stand, control characters are refused; see below.
LETTERS = st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(LETTERS, max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(LETTERS, max_size=8), inner)
    ),
    max_leaves=12,
)


def read(folder, text, name="m.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_document(path)


def refused(folder, text, name="m.yaml"):
    with pytest.raises(RequestError) as raised:
        read(folder, text, name)
    return str(raised.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("documents")


@given(PLAIN, st.booleans(), st.sampled_from([None, 2]))
def test_json_is_read_as_the_standard_library_reads_it(folder, value, ascii_, indent):
    text = json.dumps({"a": value}, ensure_ascii=ascii_, indent=indent)
    document = read(folder, text, "m.json")
    assert document.value == json.loads(text)
    assert not document.faults


@given(PLAIN)
def test_yaml_is_read_as_it_was_written(folder, value):
    text = yaml.safe_dump({"a": value}, allow_unicode=True)
    assert read(folder, text).value == {"a": value}


@given(st.binary(max_size=300), st.sampled_from(["m.yaml", "m.json"]))
def test_whatever_the_bytes_a_file_is_read_or_refused(folder, data, name):
    (folder / name).write_bytes(data)
    try:
        read_document(folder / name)
    except RequestError as error:
        assert str(error).startswith(f"{folder / name}:")


@given(st.text("[]{}:,-#&*!|>'\"% \n\tab1?", max_size=60), st.booleans())
def test_whatever_the_punctuation_a_file_is_read_or_refused(folder, text, as_json):
    name = "m.json" if as_json else "m.yaml"
    (folder / name).write_text(text)
    try:
        document = read_document(folder / name)
    except RequestError:
        return
    assert set(document.lines.values()) <= set(range(1, text.count("\n") + 2))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2026-01-31", "2026-01-31"),
        ("1_000", "1_000"),
        ("010", 10),
        ("1e3", 1000.0),
        ("-.5", -0.5),
        (".inf", float("inf")),
        ("True", True),
        ("false", False),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("|\n  1\n", "1\n"),
        ("=", "="),
        ("<<", "<<"),
    ],
)
def test_plain_values_follow_yaml_1_2(tmp_path, text, value):
    found = read(tmp_path, f"a: {text}").value["a"]
    assert found == value
    assert type(found) is type(value)


def test_every_value_has_its_line(tmp_path):
    yaml_text = "a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n"
    json_text = '{"a": 1,\n"b":\n["x",\n{"c": 2,\n"d": 3}]}'
    lines = {
        (): 1,
        ("a",): 1,
        ("b",): 2,
        ("b", 0): 3,
        ("b", 1): 4,
        ("b", 1, "c"): 4,
        ("b", 1, "d"): 5,
    }
    assert read(tmp_path, yaml_text).lines == lines
    assert read(tmp_path, json_text, "m.json").lines == lines


def test_a_value_that_is_not_there_has_the_line_of_what_is_around_it(tmp_path):
    document = read(tmp_path, "a: 1\nb:\n  - x\n")
    assert document.line(("b", 0, "missing", 3)) == 3
    assert document.line(("c",)) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.yaml", "a: 1\nb:\n  c: 2\n  d: 3\n  c: 4\n"),
        ("m.json", '{"a": 1,\n"b":\n{"c": 2,\n"d": [{}, [3]],\n"c": 4}}'),
    ],
)
def test_a_key_given_twice_is_a_fault(tmp_path, name, text):
    (fault,) = read(tmp_path, text, name).faults
    assert fault.line == 5
    assert fault.place == ("b", "c")
    assert fault.message == "given twice, first on line 3; keep one"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x [1]\nb: 2", "m.yaml:1: YAML anchors"),
        ("a: 1\nb: *x", "m.yaml:2: YAML anchors"),
        ("a: !!python/object:os.system x", "m.yaml:1: YAML tags"),
        ("a: !!binary aGk=", "m.yaml:1: YAML tags"),
        ("a: ! x", "m.yaml:1: YAML tags"),
        ("a: 1\n---\nb: 2", "m.yaml:2: a second document"),
        ("a:\n  " + "[" * 30 + "]" * 30, "m.yaml:2: nested deeper than 16"),
        ("- " * 30 + "x", "m.yaml:1: nested deeper than 16 levels"),
        ("[" * 100_000, "m.yaml:1: n"),
        ("a: 1\nb: c: d", "m.yaml:2: not YAML: mapping values"),
        ("a: 1\nb: [1, 2", "m.yaml:2: not YAML: "),
        ("a:\n\t- 1", "m.yaml:2: not YAML: found character"),
        ("a: 'x", "m.yaml:1: not YAML: "),
        ("? [a]\n: 1", "m.yaml:1: a key must be plain text"),
        ("a: 1\nb: \x07", "m.yaml:2: holds the control character '\\x07'"),
        ("a: 1\n\x00", "m.yaml:2: holds the control character '\\x00'"),
        (b"a: 1\nb: \xff", "m.yaml:2: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("a: 1".encode("utf-16"), "m.yaml:1: byte 0xff is not UTF-8"),
        ("", "m.yaml:1: the file is empty"),
        (" \n\n", "m.yaml:1: the file is empty"),
    ],
)
def test_yaml_that_is_refused(tmp_path, text, words):
    assert words in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n"b": }', "m.json:2: not JSON: Expecting value (column 6)"),
        ("{'a': 1}", "m.json:1: not JSON: "),
        ('{"a": 1} x', "m.json:1: not JSON: Extra data"),
        ('{"a":\n' + "[" * 30 + "]" * 30 + "}", "m.json:2: nested deeper than 16"),
        ("[" * 1_000_000, "m.json:1: nested deeper than 16"),
    ],
)
def test_json_that_is_refused(tmp_path, text, words):
    assert words in refused(tmp_path, text, "m.json")


def test_a_bomb_of_aliases_is_refused_before_it_is_built(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 30):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    assert "m.yaml:1: YAML anchors" in refused(tmp_path, "\n".join(lines))


@pytest.mark.parametrize("name", ["m.yaml", "m.json"])
def test_a_number_with_very_many_digits_stays_a_number(tmp_path, name):
    value = read(tmp_path, '{"a": ' + "9" * 100_000 + "}", name).value["a"]
    assert value > 10**30


def test_a_file_that_is_too_large_is_refused(tmp_path):
    assert "more than 4 MiB" in refused(tmp_path, "#" * (MOST_BYTES + 1))
    assert "is empty" not in refused(tmp_path, "a: '" + "x" * (MOST_BYTES - 4))


def test_an_endless_file_is_refused():
    with pytest.raises(RequestError, match="more than 4 MiB"):
        read_document(Path("/dev/zero"))


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path):
    with pytest.raises(RequestError, match="No such file"):
        read_document(tmp_path / "absent.yaml")
    with pytest.raises(RequestError, match="Is a directory"):
        read_document(tmp_path)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    document = read(tmp_path, b"\xef\xbb\xbfa: 1\r\nb: x\r\n")
    assert document.value == {"a": 1, "b": "x"}
    assert document.lines[("b",)] == 2
