"""Hostile files: each is refused by a clear error in under a second, and nothing of it runs."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmem_callbacks as jm
from jaxmem_callbacks.config.presets import parse_preset
from jaxmem_callbacks.records.errors import PresetError


def refused(call, *args):
    """The error's text, when it came in time."""
    start = time.thread_time()  # of this thread: others on the machine do not count
    with pytest.raises(PresetError) as caught:
        call(*args)
    assert time.thread_time() - start < 1
    assert len(str(caught.value)) < 2000, "an error must not flood the terminal"
    return str(caught.value)


BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
TAGS = [
    "!!python/object/apply:os.system ['touch {marker}']",
    "!!python/object/new:os.system ['touch {marker}']",
    "!!python/name:os.system",
    "!!python/module:os",
    "!!binary aGVsbG8=",
    "!!str text",
    "!custom text",
    "!<tag:example.org,2026:x> text",
]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("where", ["policy: {value}", "{value}", "? {value}\n: 1", "policy: [{value}]"])
def test_tags_run_nothing(tmp_path, tag, where):
    marker = tmp_path / "ran"
    path = tmp_path / "evil.yaml"
    path.write_text(where.format(value=tag.format(marker=marker)).replace("{value}", tag))
    message = refused(jm.load_preset, path)
    assert f"{path}:1:" in message
    assert not marker.exists()


def test_the_tag_is_named_with_its_place():
    message = refused(parse_preset, "policy:\n  remat: !!python/name:os.system\n")
    assert message.startswith("text:2:10: the YAML tag 'tag:yaml.org,2002:python/name:os.system'.")
    assert "Expected: plain values. Delete the tag." in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "text:1:4: the YAML alias or anchor '&a'."),
        ("policy: *x", "text:1:9: the YAML alias or anchor '*x'.\n    Expected: plain values."),
        ("*x : 1", "text:1:1: the YAML alias or anchor '*x'."),
        ("base: &base {remat: full}\npolicy:\n  <<: *base\n", "text:1:7: the YAML alias or anchor '&base'."),
        ("policy: " + "[" * 5000, "nested more than 8 deep."),
        ("policy: " + "{a: " * 5000, "nested more than 8 deep."),
        ("- " * 5000, "this is a list."),
        ("? " * 5000, "text:1:3: a list or mapping stands as a key."),
        ("policy:\n  save: [" + "a," * 30_000 + "]", "more than 2000 keys and values."),
        ("a: 1\n" * 12_000, "more than 2000 keys and values."),
        ("a: 1\n" * 900, "900 problems:"),
        ("a: 1\n" * 900, "\n... 890 more ...\n"),
        ("a: !" + "n" * 60_000 + "!x 1", "found undefined tag handle '!nnn"),
        ("? [a]\n: 1", "text:1:3: a list or mapping stands as a key.\n    Expected: a name as the key."),
        ("? {a: 1}\n: 1", "a list or mapping stands as a key."),
        ("policy: {remat: full\0}", "text:1:21: a NUL byte."),
        ("a: 1\npolicy: {remat: \x07}", "text:2:17: the character U+0007 is not allowed in YAML."),
        ("", "text: this is empty.\n    Expected: a mapping such as `policy: {remat: full}`."),
        ("# only a comment\n", "text: this is empty."),
        ("---\n...\n", "text: this is empty."),
        ("- a\n- b", "text:1:1: this is a list."),
        ("full", "text:1:1: this is a single value."),
        ("policy: {}\n---\nmonitor: {}", "text:2:1: a second YAML document begins here."),
        (
            "policy:\n\tremat: full",
            "text:2:1: this is not YAML: while scanning for the next token, found character '\\t'",
        ),
        ("policy:\n\tremat: full", "Indent with spaces, not tabs."),
        ("policy: {remat: full", "this is not YAML: while parsing a flow mapping"),
        ("policy: 'open", "this is not YAML: while scanning a quoted scalar"),
        ("a: !nope!x 1", "this is not YAML: while parsing a node, found undefined tag handle '!nope!'"),
        ("%YAML 9.9\n---\na: 1", "this is not YAML"),
        ("policy: {" + "k" * 60_000 + ": 1}", "this is not YAML: while parsing a flow mapping, expected ','"),
        ("k" * 1000 + ": 1", "unknown key 'kkkk"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_hostile_text(text, words):
    assert words in refused(parse_preset, text)


def test_duplicates_before_a_fatal_error_are_told_too():
    message = refused(parse_preset, "a: 1\na: 2\nb: *x")
    assert "text:2:1: the key 'a' is given twice" in message
    assert "text:3:4: the YAML alias" in message


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "huge.yaml"
    with path.open("wb") as stream:
        stream.truncate(100 * 10**6)
    message = refused(jm.load_preset, path)
    assert f"{path}: the file has 95.4 MiB, which is too large to be a preset." in message
    assert "Expected: the path of a YAML file of at most 64.0 KiB." in message


def test_the_largest_allowed_file_is_in_time(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_text("policy: {remat: full}\n" + "# padding\n" * 6500)
    start = time.thread_time()
    assert jm.load_preset(path).policy.remat == "full"
    assert time.thread_time() - start < 1
    path.write_text("x" * (64 * 1024 + 1))
    assert "too large to be a preset" in refused(jm.load_preset, path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a: 1\nb: \xff\xfe", ":2:4: this is not UTF-8 text: byte 0xff."),
        ("policy: {}".encode("utf-16"), ":1:1: this is not UTF-8 text: byte 0xff."),
        (b"\x80" * 1000, "iconv -t UTF-8"),
        (b"\x7fELF\x01\x00\x00", "a NUL byte.\n    Expected: a YAML file, not a binary one."),
    ],
)
def test_files_that_are_no_text(tmp_path, data, words):
    path = tmp_path / "bytes.yaml"
    path.write_bytes(data)
    assert words in refused(jm.load_preset, path)


def test_a_byte_order_mark_and_windows_lines_are_fine(tmp_path):
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfpolicy:\r\n  remat: full\r\n")
    assert jm.load_preset(path).policy.remat == "full"


def test_what_is_no_file(tmp_path):
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    assert f"{fifo}: this is a FIFO, not a file." in refused(jm.load_preset, fifo)
    assert "this is a folder, not a file." in refused(jm.load_preset, tmp_path)
    assert "this is a device or socket, not a file." in refused(jm.load_preset, "/dev/zero")
    assert "the file cannot be read: No such file or directory." in refused(jm.load_preset, tmp_path / "none.yaml")
    assert "the file cannot be read: embedded null byte." in refused(jm.load_preset, "a\0b.yaml")


@pytest.mark.skipif(not Path("/proc/kallsyms").exists(), reason="needs a large file under /proc that says a size of 0")
def test_a_file_that_hides_its_size_is_cut_off():
    assert "too large to be a preset" in refused(jm.load_preset, "/proc/kallsyms")


SOUP = (
    r"""policy@monitor@remat@save@limit@full@: @:@\n@\n  @- @? @{@}@[@]@,@'@"@#@&a @*a@!!str @!t @|\n@>-\n"""
    r"""@---\n@...\n@<<@~@1e9@\x@\u2028@\ufeff"""
)
WORDS = [
    word.replace(r"\n", "\n").replace(r"\u2028", "\u2028").replace(r"\ufeff", "\ufeff") for word in SOUP.split("@")
]
YAML_SOUP = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=25).map("".join)


@pytest.mark.core
@settings(deadline=None, max_examples=300)
@given(YAML_SOUP)
def test_any_text_is_a_preset_or_a_preset_error(text):
    try:
        parse_preset(text)
    except PresetError as error:
        assert "Expected: " in str(error) or "Allowed here: " in str(error) or "Given here: " in str(error)  # noqa: PT017 - either way


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["remat", "segments", "save", "donate", "limit", "limit_bytes", "every_steps", "jsonl", "on_error", "nope"]
)


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from(["policy", "monitor", "description", "nope"]), JSON | st.dictionaries(KEYS, JSON, max_size=4)
    )
)
def test_any_override_is_a_preset_or_a_preset_error(overrides):
    try:
        jm.load_preset("full_remat", **overrides)
    except PresetError as error:
        assert str(error)  # noqa: PT017 - either way
