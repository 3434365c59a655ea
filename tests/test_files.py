"""The file tools: what they read, what they write, what they leave alone, and how they refuse."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from harness import KEY, agent, make_agent, results, said, texts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages_api import Reply, call, is_summary

if TYPE_CHECKING:
    from agent import Agent

NOWHERE: Any = SimpleNamespace(url="http://127.0.0.1:9")  # for agents that only run calls
FILE_CALLS: dict[str, dict[str, Any]] = {  # what each file tool takes beside the path
    "read_file": {},
    "write_file": {"content": "secret\nmine\n"},
    "edit_file": {"old_text": "secret", "new_text": "mine"},
}
TEN = [f"line {i}" for i in range(1, 11)]


@pytest.fixture
def folder(tmp_path):
    """A working directory whose path has no links in it."""
    (tmp_path / "work").mkdir()
    return (tmp_path / "work").resolve()


@pytest.fixture
def a(folder):
    return make_agent(NOWHERE, folder)


def result(a, name, **arguments):
    """What the loop makes of one call: the text, and whether it is an error."""
    return a.run_call({"type": "tool_use", "id": "call", "name": name, "input": arguments})


def use(a, name, **arguments):
    """The result of a call that must work."""
    text, is_error = result(a, name, **arguments)
    assert not is_error, text
    return text


def refused(a, name, **arguments):
    """The sentence with which a call is refused."""
    text, is_error = result(a, name, **arguments)
    assert is_error, text
    assert not re.search(r"Traceback|Errno|Error\(|<class|\n", text)
    assert len(text) < 1100
    return text


def edit(a, old, new, path="file", **more):
    return use(a, "edit_file", path=path, old_text=old, new_text=new, **more)


def edited(a, data, old, new, **more):
    """The bytes of a file after one edit."""
    file = a.workspace.root / "file"
    file.write_bytes(data)
    edit(a, old, new, **more)
    return file.read_bytes()


# ================================ Reading ================================


@pytest.mark.parametrize("end", ["\n", "", "\r\n"], ids=["newline", "no newline", "CRLF"])
def test_ten_lines_are_ten_lines(a, folder, end):
    """Whole, in part, and from the last line on; never a phantom line."""
    text = ("\r\n" if end == "\r\n" else "\n").join(TEN) + end
    (folder / "file").write_bytes(text.encode())
    assert use(a, "read_file", path="file") == "\n".join(TEN)
    assert use(a, "read_file", path="file", limit=99999) == "\n".join(TEN)
    assert use(a, "read_file", path="file", limit=10) == "\n".join(TEN)
    *lines, note = use(a, "read_file", path="file", limit=3).split("\n")
    assert lines == TEN[:3] and "more" in note and "offset=4" in note
    assert use(a, "read_file", path="file", offset=10) == "line 10"
    assert use(a, "read_file", path="file", offset=8, limit=3) == "\n".join(TEN[7:])
    assert "10 lines" in refused(a, "read_file", path="file", offset=11)
    edit(a, "line 10", "last")
    assert (folder / "file").read_bytes().decode() == text.replace("line 10", "last")


def test_a_refused_reading_says_nothing_untrue_about_the_number_of_lines(a, folder):
    (folder / "file").write_text("one more line\n" * 4000)
    for odd in ({"offset": 0}, {"offset": -7}, {"limit": 0}, {"offset": 4001}, {"offset": 10**12}):
        counts = re.findall(r"([\d,]+) lines", refused(a, "read_file", path="file", **odd))
        assert set(counts) <= {"4000", "4,000"}, odd


def test_a_file_without_text_is_described_in_words(serve, folder):
    contents = {"no byte": "", "newline": "\n", "mark": "\ufeff", "newlines": "\n\n\n"}
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    api = serve([Reply(*[call("read_file", {"path": name}) for name in contents]), "Done."])
    make_agent(api, folder).run("Read them.")
    answers = results(api.requests[-1].messages)
    assert all(answer["content"].strip() and not answer.get("is_error") for answer in answers)
    assert "empty" in answers[0]["content"]


def test_a_long_file_can_be_read_on_to_its_end(serve, folder):
    """Each part says that it is one, and where to go on; together they are the file."""
    lines = [f"{i}: " + "x" * (i % 40) for i in range(1, 5001)]
    (folder / "file").write_text("\n".join(lines) + "\n")
    pages = []

    def read_on(request):
        last = [answer["content"] for answer in results(request.messages)][-1:]
        pages.extend(last)
        found = re.search(r"offset=(\d+)", last[0].rpartition("\n")[2]) if last else None
        if last and not found:
            return "Done."
        offset = int(found[1]) if found else 1
        return Reply(call("read_file", {"path": "file", "offset": offset}))

    assert make_agent(serve(read_on), folder).run("Read it.") == "Done."
    assert 3 < len(pages) < 20 and max(map(len, pages)) <= 24_000
    bodies = [page.rpartition("\n")[0] for page in pages[:-1]] + pages[-1:]
    assert "\n".join(bodies) == "\n".join(lines)


def test_a_line_of_two_megabytes_says_where_the_whole_of_it_is(serve, folder):
    line = "".join(f"{i:06d}\u20ac" for i in range(220_000))
    (folder / "file").write_text(f"first\n{line}\nlast\n", encoding="utf-8")
    calls = [call("read_file", {"path": "file", "offset": offset}) for offset in (2, 3)]
    api = serve([Reply(*calls), "Done."])
    make_agent(api, folder).run("Read it.")
    cut, last = [answer["content"] for answer in results(api.requests[-1].messages)]
    head, note, tail, more = cut.split("\n")
    assert len(cut.encode()) <= 24_000 and line.startswith(head) and line.endswith(tail)
    missing, address = re.search(r"([\d,]+) bytes left out; the whole is in (\S+)", note).groups()
    whole = (folder / address).read_text(encoding="utf-8")
    assert whole == f"{line}\n{more}" and more.endswith("offset=3]") and last == "last"
    seen = len((head + tail + more).encode())
    assert int(missing.replace(",", "")) == pytest.approx(len(whole.encode()) - seen, abs=9)


def test_a_part_of_a_huge_file_is_read_without_the_rest_in_memory(a, folder):
    with open(folder / "log", "w") as file:
        file.writelines(f"{number} {'log ' * 250}\n" for number in range(1, 30_001))
    assert (folder / "log").stat().st_size > 22_000_000
    tracemalloc.start()
    try:
        page = use(a, "read_file", path="log", offset=29_990, limit=3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [line.split()[0] for line in page.split("\n")[:-1]] == ["29990", "29991", "29992"]
    assert "offset=29993" in page and peak < 2_000_000


def test_odd_bytes_are_read_as_text_and_binaries_are_not(serve, folder):
    (folder / "odd").write_bytes(b"\xff\xfe\x01 \x1b[31m\xed\xa0\x80\n")
    (folder / "binary").write_bytes(b"\x7fELF\0\0\0")
    (folder / "wide").write_bytes("name = one\n".encode("utf-16"))
    api = serve([Reply(*[call("read_file", {"path": p}) for p in ("odd", "binary", "wide")]), "ok"])
    make_agent(api, folder).run("Read them.")
    odd, binary, wide = results(api.requests[-1].messages)
    assert not odd.get("is_error") and "\ufffd" in odd["content"]
    assert all(answer["is_error"] and "binary" in answer["content"] for answer in (binary, wide))
    json.dumps([odd, binary], ensure_ascii=False).encode()


def odd_places(folder):
    """Names in `folder` of things that are no files that could be read."""
    os.mkfifo(folder / "fifo")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "directory").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "plain").write_text("plain\n")
    with open(folder / "sparse", "wb") as sparse:
        sparse.truncate(3 << 30)
    names = ["fifo", "/dev/zero", "zero", "/dev/tty", "directory", "dangling", "loop", "sparse"]
    return [*names, "plain/below", "socket"]


@contextlib.contextmanager
def socket_in(folder):
    """A listening socket with the name "socket"; its path must be short, so it is bound there."""
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(".", os.O_RDONLY)
        os.chdir(folder)
        try:
            listener.bind("socket")
        finally:
            os.fchdir(here)
            os.close(here)
        yield


def test_what_is_no_plain_file_is_answered_at_once_with_one_sentence(a, folder):
    odd = odd_places(folder)
    calls = [(name, path, more) for path in odd for name, more in FILE_CALLS.items()]
    calls.remove(("write_file", "dangling", FILE_CALLS["write_file"]))  # it may make the target
    before = sorted([*os.listdir(folder), "socket"])
    answers = []

    def work():
        for name, path, more in calls:
            answers.append(result(a, name, path=path, **more))

    with socket_in(folder):
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(30)
        assert not worker.is_alive(), calls[len(answers)]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000  # kilobytes
        assert sorted(os.listdir(folder)) == before
    for (_, path, _), (text, is_error) in zip(calls, answers, strict=True):
        assert is_error and len(text) < 300 and "\n" not in text, text
        assert not re.search(r"Traceback|Errno|Error\(|<class", text), text
        assert path in text or str(folder) in text, text
        if path == "directory":
            assert "directory" in text and re.search(r"\bls\b", text)
    assert (folder / "plain").read_text() == "plain\n" and (folder / "dangling").is_symlink()
    (folder / "sparse").unlink()


# ================================ Names and characters ================================

CHARACTERS = (
    "\u2019 \u201c \u201d \u2014 \u00a0 \u202f \U0001f469\u200d\U0001f4bb \u00e9 e\u0301 \u2028 "
    "\x0c \x85 \ufeff \t."
)
NAMES = [
    "it\u2019s",
    "cafe\u0301",
    "caf\u00e9",
    "-rf",
    "--",
    "two\nlines",
    "ends in spaces  ",
    " starts",
    "a\u00a0b",
    "\u201cquoted\u201d",
    "$HOME",
    "*",
    "semi;colon",
    "back\\slash",
    "tab\t",
    "n" * 255,
    "\U0001f469\u200d\U0001f4bb",
]


def test_every_character_arrives_on_disk_as_it_was_given(a, folder):
    use(a, "write_file", path="file", content=f"{CHARACTERS}\nold\n{CHARACTERS}")
    edit(a, f"old\n{CHARACTERS[:9]}", f"new {CHARACTERS}\n")
    expected = f"{CHARACTERS}\nnew {CHARACTERS}\n{CHARACTERS[9:]}"
    assert (folder / "file").read_bytes() == expected.encode()
    assert use(a, "read_file", path="file") == expected


def test_every_name_that_ls_shows_works_as_it_stands(a, folder):
    for name in NAMES:
        use(a, "write_file", path=name, content=f"{name} old\n")
        edit(a, " old\n", " new\n", path=name)
        assert use(a, "read_file", path=name) == f"{name} new"
    assert sorted(os.listdir(folder)) == sorted(NAMES)


def test_a_name_that_no_file_can_have_is_refused_in_short(a, folder):
    for name in ("a\0b", "\ud800", "", "p" * 100_000, "p/" * 5000):
        for tool, more in FILE_CALLS.items():
            text, is_error = result(a, tool, path=name, **more)
            assert is_error and len(text) < 1100
    assert os.listdir(folder) == []


def test_a_tilde_is_neither_a_home_nor_a_name(a, tmp_path, folder, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / ".profile").write_text("private\n")
    monkeypatch.setenv("HOME", str(home))
    answers = [
        refused(a, "write_file", path="~/note.txt", content="x"),
        refused(a, "write_file", path="~", content="x"),
        refused(a, "read_file", path="~/.profile"),
        refused(a, "edit_file", path="~root/x", old_text="a", new_text="b"),
    ]
    assert all("~" in answer and "not expanded" in answer for answer in answers)
    assert os.listdir(folder) == [] and os.listdir(home) == [".profile"]


# ================================ Editing ================================


def test_text_that_occurs_three_times_is_replaced_only_with_replace_all(a, folder):
    before = "[one]\nport = 80\n[two]\nport = 80\n[three]\nport = 80\n"
    (folder / "file").write_text(before)
    sentence = refused(a, "edit_file", path="file", old_text="port = 80", new_text="port = 81")
    assert "3 times" in sentence and "replace_all" in sentence and "more" in sentence
    assert re.search(r"\b2 and 4\b", sentence)
    assert (folder / "file").read_text() == before
    done = edit(a, "port = 80", "port = 81", replace_all=True)
    assert re.search(r"\b3 replaced", done)
    assert (folder / "file").read_text() == before.replace("80", "81")


def test_overlapping_matches_count(a, folder):
    (folder / "file").write_bytes(b"x\naaa\n")
    sentence = refused(a, "edit_file", path="file", old_text="aa", new_text="b")
    assert "2 times" in sentence and (folder / "file").read_bytes() == b"x\naaa\n"
    (folder / "file").write_bytes(b"aaaaa b aa\n")
    assert re.search(r"\b3 replaced", edit(a, "aa", "X", replace_all=True))
    assert (folder / "file").read_bytes() == b"XXa b X\n"


def is_utf8(data: bytes) -> bool:
    return data.decode(errors="replace").encode() == data


LINE_ENDS = [
    (b"a\r\nb\r\nc\r\n", "b", "B", b"a\r\nB\r\nc\r\n"),
    (b"a\r\nb\r\nc\r\n", "b", "B1\nB2", b"a\r\nB1\r\nB2\r\nc\r\n"),
    (b"a\r\nb\r\nc\r\n", "a\nb", "A\nB", b"A\r\nB\r\nc\r\n"),
    (b"a\r\nb\r\nc\r\n", "a\r\nb", "A\r\nB", b"A\r\nB\r\nc\r\n"),
    (b"a\r\nb\r\nc\r\n", "b\n", "", b"a\r\nc\r\n"),
    (b"a\r\nb\r\nc\r\n", "b\nc\n", "x\n", b"a\r\nx\r\n"),
    (b"a\r\nb\r\nc\r\n", "\nb", "\nB", b"a\r\nB\r\nc\r\n"),
    (b"a\r\nb\r\nc\r\n", "\nb\n", "\n", b"a\r\nc\r\n"),
    (b"a\r\n\r\nb\r\n", "a\n\nb", "a\nb", b"a\r\nb\r\n"),
    (b"a\nb\r\nc\nd\r\n", "b", "B", b"a\nB\r\nc\nd\r\n"),
    (b"a\nb\r\nc\nd\r\n", "c", "C", b"a\nb\r\nC\nd\r\n"),
    (b"a\nb\r\nc\nd\r\n", "b", "B1\nB2", b"a\nB1\r\nB2\r\nc\nd\r\n"),
    (b"a\nb\r\nc\nd\r\n", "c", "C1\nC2", b"a\nb\r\nC1\nC2\nd\r\n"),
    (b"a\nb\r\nc\nd\r\n", "b\nc", "X", b"a\nX\nd\r\n"),
    (b"a\rb\rc\r", "b", "B", b"a\rB\rc\r"),
    (b"a\nb\n", "a", "a\r", b"a\r\nb\n"),
    (b"a\nb\nc", "c", "C", b"a\nb\nC"),
    (b"a\nb\nc", "a", "A", b"A\nb\nc"),
    (b"a\nb\nc", "b\n", "B\n", b"a\nB\nc"),
    (b"a\nb\n", "a\r\nb", "A\r\nB", b"A\nB\n"),
    (b"a\r\nb", "b", "b\n", b"a\r\nb\r\n"),
]


def test_an_edit_changes_only_its_lines_and_inserted_lines_end_like_those_around_them(a):
    """CRLF, mixed, lone CR, no newline at the end."""
    for data, old, new, expected in LINE_ENDS:
        assert edited(a, data, old, new) == expected, (data, old, new)


def test_lines_that_differ_only_in_their_ends_are_two_matches(a, folder):
    """A reading shows both alike, so the text does not say which of them is meant."""
    data = b"if x:\n  go\nelse:\nif x:\r\n  go\r\n"
    (folder / "file").write_bytes(data)
    sentence = refused(a, "edit_file", path="file", old_text="if x:\n  go", new_text="stay")
    assert "2 times" in sentence and (folder / "file").read_bytes() == data


def test_lines_with_mixed_ends_are_replaced_or_the_refusal_says_why(a, folder):
    """Never is half of a line end left behind."""
    for data, old, expected in (
        (b"top\none\r\ntwo\n", "top\none\ntwo", b"x\n"),
        (b"one\r\ntwo\nend\n", "\ntwo\n", b"onexend\n"),
    ):
        (folder / "file").write_bytes(data)
        text, is_error = result(a, "edit_file", path="file", old_text=old, new_text="x")
        assert (folder / "file").read_bytes() == (data if is_error else expected)
        assert not is_error or "line ends" in text


FOREIGN = {
    "latin-1": b"# caf\xe9 \xfc\xdf\r\nname = one\r\n# \xa0\n",
    "gbk": "# \u4e2d\u6587\u6ce8\u91ca\nname = one\n# \u6c49\u5b57\n".encode("gbk"),
    "shift-jis": "# \u65e5\u672c\u8a9e\nname = one\n".encode("shift_jis"),
    "stray byte": b"# good \xc3\xa9, stray \xff\nname = one\n",
    "mark and stray byte": b"\xef\xbb\xbf# \xff\nname = one\n",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_a_file_in_another_encoding_keeps_every_byte_that_is_not_edited(a, folder, data):
    (folder / "file").write_bytes(data)
    use(a, "read_file", path="file")
    written = refused(a, "write_file", path="file", content="# all new\n")
    assert "edit_file" in written and "UTF-8" in written
    mixed = refused(a, "edit_file", path="file", old_text="one", new_text="na\u00efve")
    assert "UTF-8" in mixed
    assert (folder / "file").read_bytes() == data
    edit(a, "one", "two")
    assert (folder / "file").read_bytes() == data.replace(b"one", b"two")
    refused(a, "write_file", path="file", content="# all new\n")


def test_ascii_text_does_not_match_in_a_utf16_file(a, folder):
    data = "# caf\u00e9\nname = one\n".encode("utf-16")
    (folder / "file").write_bytes(data)
    refused(a, "edit_file", path="file", old_text="one", new_text="two")
    refused(a, "write_file", path="file", content="all new\n")
    assert (folder / "file").read_bytes() == data


def test_a_replacement_character_is_a_character_like_any_other(a):
    data = "# shown as \ufffd\nname = one\n".encode()
    assert edited(a, data, "one", "\u00e9l\u00e8ve") == data.replace(b"one", b"\xc3\xa9l\xc3\xa8ve")


def test_a_byte_order_mark_is_neither_in_the_way_nor_lost(a, folder):
    mark = b"\xef\xbb\xbf"
    assert edited(a, mark + b"import os\n", "import os", "import re") == mark + b"import re\n"
    assert use(a, "read_file", path="file") == "import re"
    edit(a, "import re", "import sys")
    assert (folder / "file").read_bytes() == mark + b"import sys\n"
    use(a, "write_file", path="file", content="\ufeffimport io\n")
    assert (folder / "file").read_bytes() == mark + b"import io\n"


def test_what_cannot_be_edited_has_a_message_of_its_own(a, folder):
    (folder / "file").write_text("\n".join(TEN) + "\n")
    (folder / "empty").write_bytes(b"")
    os.utime(folder / "file", ns=(10**18, 10**18))

    def sentence(path, old, new):
        return refused(a, "edit_file", path=path, old_text=old, new_text=new)

    same = sentence("file", "line 3", "line 3")
    typo = sentence("file", "lime 3", "line three")
    missing = sentence("nosuch", "line 3", "line three")
    assert "nothing to change" in same
    assert "not found" in typo and "10 lines" in typo
    assert "not found" in sentence("file", "3: line 3", "line three")
    assert re.search(r"(?i)no such file", missing) and "nosuch" in missing
    assert all("empty" in sentence(path, "", "X") for path in ("file", "empty"))
    sentence("missing", "", "X")
    assert (folder / "file").stat().st_mtime_ns == 10**18
    assert sorted(os.listdir(folder)) == ["empty", "file"]
    assert (folder / "empty").read_bytes() == b""


def test_an_edit_of_long_texts_takes_time_in_proportion_to_them(a, folder):
    """Each of these would take hours if every place were compared with the whole text."""
    (folder / "file").write_bytes(b"a" * 4_000_000)
    for old in ("a" * 2_000_000 + "b", "b" + "a" * 2_000_000, "ab" * 1_000_000):
        assert "not found" in refused(a, "edit_file", path="file", old_text=old, new_text="x")
    refused(a, "edit_file", path="file", old_text="a" * 2_000_000, new_text="x")
    (folder / "file").write_bytes(b"a\n" * 400_000)
    done = agent.edit_file(a, "file", "a\n", "b\n", replace_all=True)
    assert done.new == b"b\n" * 400_000


# ================================ Writing ================================

OLD = "one\ntwo\nthree\n"
TYPED = "typed by the user\n"


def test_a_write_stores_exactly_the_bytes_that_were_given(a, folder):
    for number, content in enumerate(["a\r\nb\r\n", "a\r\nb\nc\rd", "a\n", "\n\n", "", "a\r"]):
        use(a, "write_file", path=f"deep/er/{number}", content=content)
        assert (folder / f"deep/er/{number}").read_bytes() == content.encode()


def test_a_result_says_created_or_replaced_with_bytes_and_lines(a):
    created = use(a, "write_file", path="file", content=OLD)
    assert created.startswith("Created file") and re.search(r"\b14 bytes, 3 lines", created)
    replaced = use(a, "write_file", path="file", content="new\n")
    assert re.search(r"Replaced the 14 bytes.*\b4 bytes, 1 line", replaced)


def test_a_file_that_was_not_read_whole_is_not_replaced(a, folder):
    (folder / "file").write_text(OLD)
    (folder / "empty").write_bytes(b"")

    def kept():
        assert "read" in refused(a, "write_file", path="file", content="new\n")
        return (folder / "file").read_text() == OLD

    assert kept()
    use(a, "read_file", path="file", limit=2)
    assert kept()
    use(a, "read_file", path="file", offset=2)
    assert kept()
    use(a, "read_file", path="file")
    use(a, "write_file", path="file", content="new\n")
    assert (folder / "file").read_text() == "new\n"
    use(a, "write_file", path="empty", content="there was nothing to read\n")


def test_parts_of_two_states_of_a_file_do_not_make_it_read(a, folder):
    (folder / "file").write_text(OLD)
    use(a, "read_file", path="file", limit=1)
    (folder / "file").write_text(OLD.replace("one", "uno"))
    use(a, "read_file", path="file", offset=2)
    refused(a, "write_file", path="file", content="new\n")
    assert (folder / "file").read_text() == OLD.replace("one", "uno")


def test_a_line_that_was_shown_in_part_does_not_make_a_file_read(a, folder):
    (folder / "file").write_text("x" * 30_000)
    use(a, "read_file", path="file")
    refused(a, "write_file", path="file", content="new\n")
    a.workspace.result_cap = 1_000  # a batch of many calls leaves less room to each
    (folder / "file").write_text("y" * 2_000)
    use(a, "read_file", path="file")
    refused(a, "write_file", path="file", content="new\n")


def test_a_change_by_the_user_survives_an_edit_and_stops_a_write(a, folder):
    (folder / "file").write_text(OLD)
    use(a, "read_file", path="file")
    (folder / "file").write_text(OLD + TYPED)
    edit(a, "two", "TWO")
    assert (folder / "file").read_text() == OLD.replace("two", "TWO") + TYPED
    refused(a, "write_file", path="file", content="one\nTWO\nTHREE\n")  # the edit did not read it
    assert (folder / "file").read_text() == OLD.replace("two", "TWO") + TYPED
    use(a, "read_file", path="file")
    use(a, "write_file", path="file", content="all new\n")
    assert (folder / "file").read_text() == "all new\n"


def test_a_change_of_the_same_size_and_time_is_noticed(a, folder):
    file = folder / "file"
    file.write_text("speed = 1\n")
    before = file.stat()
    use(a, "read_file", path="file")
    file.write_text("speed = 2\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused(a, "write_file", path="file", content="speed = 3\n")
    assert file.read_text() == "speed = 2\n"


def test_what_the_model_wrote_itself_it_knows(a, folder):
    use(a, "write_file", path="file", content="one\n")
    use(a, "write_file", path="file", content="two\n")
    edit(a, "two", "three")
    use(a, "write_file", path="file", content="four\n")
    (folder / "file").write_text(TYPED)
    refused(a, "write_file", path="file", content="five\n")
    assert (folder / "file").read_text() == TYPED


def test_a_conversation_that_goes_on_reads_a_file_again_before_it_replaces_it(serve, folder):
    write = call("write_file", {"path": "file", "content": OLD})
    api = serve([Reply(write), "Written."])
    make_agent(api, folder).run("Write it.")
    (folder / "file").write_text(OLD + TYPED)

    again = call("write_file", {"path": "file", "content": "all new\n"})
    read = call("read_file", {"path": "file"})
    seen = []

    def look(request):
        seen.append((folder / "file").read_text())
        return Reply(read, call("write_file", {"path": "file", "content": "all new\n"}))

    api = serve([Reply(again), look, "Done."])
    later = make_agent(api, folder)
    agent.resume(later)
    assert later.run("Write it again.") == "Done."
    first, _, last = results(api.requests[-1].messages)[-3:]
    assert first["is_error"] and "read it first" in first["content"] and seen == [OLD + TYPED]
    assert not last.get("is_error") and (folder / "file").read_text() == "all new\n"


def test_a_key_that_the_model_cannot_see_is_not_overwritten(serve, folder):
    """A reading shows "[key removed]", so a write from memory would lose the key."""
    (folder / ".env").write_text(f"TOKEN={KEY}\n")
    read = call("read_file", {"path": ".env"})
    write = call("write_file", {"path": ".env", "content": "TOKEN=[key removed]\nMORE=1\n"})
    api = serve([Reply(read), Reply(write), "Done."])
    make_agent(api, folder).run("Add MORE.")
    shown, refusal = results(api.requests[-1].messages)
    assert KEY not in shown["content"]
    assert (folder / ".env").read_text() == f"TOKEN={KEY}\n" and refusal["is_error"]


def agent_that_allows(folder, meanwhile):
    """An agent whose person does something else while the question stands, and then says yes."""

    def allow(_):
        meanwhile()
        return agent.Verdict(True)

    return make_agent(NOWHERE, folder, allow)


def test_a_file_that_changes_while_the_question_stands_is_not_written(folder):
    file = folder / "file"

    def kept(before, meanwhile, content):
        file.write_text(before)
        a = agent_that_allows(folder, meanwhile)
        refused(a, "edit_file", path="file", old_text="one", new_text="1")
        assert (file.read_text() if file.exists() else None) == content

    kept(OLD, lambda: file.write_text(OLD + TYPED), OLD + TYPED)
    kept(OLD, file.unlink, None)
    new = agent_that_allows(folder, lambda: (folder / "new").write_text(TYPED))
    refused(new, "write_file", path="new", content="mine\n")
    assert (folder / "new").read_text() == TYPED


def test_a_link_that_is_turned_while_the_question_stands_is_not_followed(tmp_path, folder):
    for name in (folder / "one", folder / "two", tmp_path / "outside"):
        name.mkdir()
        (name / "file").write_text("same\n")
    link = folder / "link"
    for target in (folder / "two", tmp_path / "outside"):
        link.unlink(missing_ok=True)
        link.symlink_to("one")

        def turn(target=target):
            link.unlink()
            link.symlink_to(target)

        a = agent_that_allows(folder, turn)
        refused(a, "edit_file", path="link/file", old_text="same", new_text="other")
        assert (target / "file").read_text() == (folder / "one/file").read_text() == "same\n"


def test_what_is_not_allowed_leaves_no_trace(folder):
    a = make_agent(NOWHERE, folder, lambda _: agent.Verdict(False, "the user said no."))
    assert "said no" in refused(a, "write_file", path="deep/er/file", content="x")
    assert os.listdir(folder) == []


# ================================ A file stays what it is ================================


def change_both_ways(a, name="file"):
    """Edit a file and write it: afterwards it holds "third"."""
    use(a, "read_file", path=name)
    edit(a, "first", "second", path=name)
    use(a, "write_file", path=name, content="third\n")


def test_mode_owner_links_and_other_names_stay(a, folder):
    for mode in (0o600, 0o755, 0o640, 0o4711):
        file = folder / f"file{mode}"
        file.write_text("first\n")
        if os.getuid() == 0:
            os.chown(file, 12345, 23456)
        file.chmod(mode)
        os.utime(file, (1, 1))
        before = file.stat()
        change_both_ways(a, file.name)
        after = file.stat()
        assert after.st_mtime > 1
        assert stat.S_IMODE(after.st_mode) == mode and file.read_text() == "third\n"
        assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    (folder / "twin").write_text("first\n")
    os.link(folder / "twin", folder / "other name")
    (folder / "link").symlink_to("other name")
    change_both_ways(a, "link")
    assert (folder / "link").is_symlink() and (folder / "twin").samefile(folder / "other name")
    assert (folder / "twin").read_text() == "third\n"
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_a_new_file_has_the_mode_that_the_umask_gives(a, folder):
    before = os.umask(0o027)
    try:
        use(a, "write_file", path="deep/file", content="x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "deep/file").stat().st_mode) == 0o640
    assert stat.S_IMODE((folder / "deep").stat().st_mode) == 0o750


def test_a_write_through_a_dangling_link_makes_its_target(a, folder):
    (folder / "link").symlink_to("target")
    use(a, "write_file", path="link", content="text\n")
    assert (folder / "link").is_symlink() and (folder / "target").read_text() == "text\n"


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_private_file_is_never_more_open_than_it_was(a, folder, mode):
    """The directory is looked at after each step of the program while the file is changed."""
    (folder / "file").write_text("first\n")
    (folder / "file").chmod(mode)
    seen = Counter()

    def look(*_):
        for path in folder.iterdir():
            seen[path.name == "file", stat.S_IMODE(path.stat().st_mode)] += 1

    sys.setprofile(look)
    try:
        change_both_ways(a)
    finally:
        sys.setprofile(None)
    assert {name for name, _ in seen} == {True, False}, "the new content was never seen"
    assert [found for _, found in seen if found & ~mode] == []


@contextlib.contextmanager
def mounted(at: Path, *arguments: str) -> Iterator[None]:
    """Something mounted at a path; where that is not allowed, the test is skipped."""
    if not shutil.which("mount") or os.getuid():
        pytest.skip("only root can mount")
    done = subprocess.run(["mount", *arguments, str(at)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_mount_on_the_file_itself_stays(a, tmp_path, folder):
    (tmp_path / "source").write_text("first\n")
    (folder / "file").write_text("below\n")
    with mounted(folder / "file", "--bind", str(tmp_path / "source")):
        change_both_ways(a)
        assert (tmp_path / "source").read_text() == "third\n" and os.listdir(folder) == ["file"]
    assert (folder / "file").read_text() == "below\n"


def test_access_that_a_list_denies_stays_denied(a, folder):
    """Beside an access list the mode bits of the group mean something else."""
    file = folder / "file"
    file.write_text("first\n")
    everyone = 0xFFFFFFFF
    entries = [(1, 6, everyone), (2, 6, 12345), (4, 0, everyone), (16, 6, everyone)]
    packed = b"".join(struct.pack("<HHI", *entry) for entry in [*entries, (32, 0, everyone)])
    try:
        os.setxattr(file, "system.posix_acl_access", struct.pack("<I", 2) + packed)
    except (OSError, AttributeError):
        pytest.skip("there are no access lists here")
    change_both_ways(a)
    assert file.read_text() == "third\n"
    is_listed = "system.posix_acl_access" in os.listxattr(file)
    assert is_listed or not stat.S_IMODE(file.stat().st_mode) & stat.S_IRWXG


@pytest.mark.parametrize("name", ["write_file", "edit_file"])
@pytest.mark.parametrize("room", [0, 70_000])
def test_a_disk_that_fills_up_leaves_the_old_file(a, folder, name, room):
    """The system refuses to write more than `room` bytes into any file."""
    old = b"old\n" * 100 + b"end\n"
    (folder / "file").write_bytes(old)
    (folder / "file").chmod(0o640)
    use(a, "read_file", path="file")
    new = "new text, " * 10_000
    text = {"write_file": {"content": new}, "edit_file": {"old_text": "end", "new_text": new}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        assert "too large" in refused(a, name, path="file", **text[name])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / "file").read_bytes() == old and os.listdir(folder) == ["file"]
    assert (folder / "file").stat().st_mode & 0o7777 == 0o640
    use(a, name, path="file", **text[name])  # and with room again it works
    assert new.encode() in (folder / "file").read_bytes()


def test_a_full_disk_leaves_no_half_file_behind_another_name(folder):
    """There is room for the new content beside the old, but not for it twice."""
    with mounted(folder, "-t", "tmpfs", "-o", "size=100k", "tmpfs"):
        old = b"old text\n" * 4_400 + b"end\n"
        (folder / "file").write_bytes(old)
        os.link(folder / "file", folder / "other name")
        a = make_agent(NOWHERE, folder)
        new = "new text\n" * 1_300
        result(a, "edit_file", path="file", old_text="end\n", new_text=new)
        assert (folder / "file").read_bytes() in (old, old[:-4] + new.encode())
        assert sorted(os.listdir(folder)) == ["file", "other name"]


def test_ctrl_c_while_a_file_is_changed_waits_until_it_is_whole(serve, folder):
    """It comes at the first moment at which the change can be seen in the directory."""
    (folder / "file").write_text("first\n")
    os.link(folder / "file", folder / "other name")

    def allow(_):
        names = set(os.listdir(folder))

        def look(*_):
            if set(os.listdir(folder)) != names:
                sys.setprofile(None)
                os.kill(os.getpid(), signal.SIGINT)

        sys.setprofile(look)
        return agent.Verdict(True)

    change = call("edit_file", {"path": "file", "old_text": "first", "new_text": "second"})
    a = make_agent(serve([Reply(change)]), folder, allow)
    try:
        with pytest.raises(KeyboardInterrupt):
            a.run("Change it.")
    finally:
        sys.setprofile(None)
    assert (folder / "other name").read_text() == "second\n"
    assert results(a.messages)[-1]["content"].startswith("Edited")
    assert sorted(os.listdir(folder)) == [".transcripts", "file", "other name"]


def without_rights(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process that is not root's."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(write_end, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return json.loads(data)


def test_what_the_system_forbids_is_refused_and_a_foreign_file_keeps_its_owner():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name).resolve()
        folder.chmod(0o777)
        for name, mode in (("closed", 0), ("locked", 0o444), ("shared", 0o666)):
            (folder / name).write_text("first\n")
            (folder / name).chmod(mode)
        if os.getuid() == 0:
            os.chown(folder / "locked", 65534, 65534)
        owner = (folder / "shared").stat().st_uid
        a = make_agent(NOWHERE, folder)

        def work():
            use(a, "read_file", path="locked")
            change_both_ways(a, "shared")
            return [
                refused(a, "read_file", path="closed"),
                refused(a, "edit_file", path="closed", old_text="first", new_text="x"),
                refused(a, "write_file", path="closed", content="x"),
                refused(a, "edit_file", path="locked", old_text="first", new_text="x"),
                refused(a, "write_file", path="locked", content="x"),
            ]

        assert all("Permission denied" in sentence for sentence in without_rights(work))
        assert (folder / "shared").read_text() == "third\n"
        assert (folder / "shared").stat().st_uid == owner
        (folder / "closed").chmod(0o600)
        assert {(folder / name).read_text() for name in ("closed", "locked")} == {"first\n"}
        assert sorted(os.listdir(folder)) == ["closed", "locked", "shared"]


def test_a_file_in_a_directory_that_may_not_be_written_is_changed_in_place():
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        (folder / "shut").mkdir()
        (folder / "shut/file").write_text("first\n")
        (folder / "shut/file").chmod(0o666)
        (folder / "shut").chmod(0o555)
        a = make_agent(NOWHERE, folder)
        without_rights(lambda: change_both_ways(a, "shut/file"))
        (folder / "shut").chmod(0o755)
        assert (folder / "shut/file").read_text() == "third\n"
        assert os.listdir(folder / "shut") == ["file"]


# ================================ What the question shows ================================


def diff_of(a, before, old, new):
    (a.workspace.root / "file").write_bytes(before)
    return agent.edit_file(a, "file", old, new).diff()


def test_a_diff_shows_the_changed_lines_with_two_around_them(a, folder):
    before = ("\n".join(TEN) + "\n").encode()
    around = [" line 4", " line 5", "-line 6", "+six", "+and more", " line 7", " line 8"]
    assert diff_of(a, before, "line 6", "six\nand more") == around
    assert diff_of(a, before, "line 1\n", "") == ["-line 1", " line 2", " line 3"]
    assert agent.write_file(a, "new", "a\n\nb\n").diff() == ["+a", "+", "+b"]
    assert agent.changed_lines(["same"], ["same"]) == []


def test_a_diff_shows_what_changes_in_bytes(a):
    assert diff_of(a, b"# caf\xe9 \xff one\n", "one", "two") == [
        "-# caf\\xe9 \\xff one",
        "+# caf\\xe9 \\xff two",
    ]
    assert diff_of(a, b"a\r\nb\r\n", "b", "B") == [" a\r", "-b\r", "+B\r"]
    assert diff_of(a, b"a\nb", "b", "b\n") == [" a", "-b  (no newline at the end)", "+b"]


def test_a_diff_hides_no_line_that_says_what_a_diff_says(a):
    """A line whose own words are those that tell of a missing line end."""
    words = "b  (no newline at the end)"
    assert diff_of(a, b"b", "b", words + "\n") == ["-" + words, "+" + words]


def test_a_diff_names_the_file_that_a_link_leads_to(a, folder):
    (folder / ".git/hooks").mkdir(parents=True)
    (folder / "sub").mkdir()
    for name in (".git/config", ".git/hooks/check", "sub/own"):
        (folder / name).write_text("text\n")
    (folder / "sub/notes.md").symlink_to("../.git/config")
    (folder / "config").symlink_to(".git/config")
    (folder / "hooks").symlink_to(".git/hooks")

    def first_line(path):
        return agent.edit_file(a, path, "text", "other").diff()[0]

    linked = {"sub/notes.md": ".git/config", "config": ".git/config", "hooks/check": None}
    for path, file in linked.items():
        assert str(folder / (file or ".git/hooks/check")) in first_line(path), path
    for path in ("sub/own", "./sub/../sub//own", str(folder / "sub/own"), ".git/config"):
        assert first_line(path) == "-text", path


def test_the_question_shows_the_diff_and_the_file_that_would_be_written(folder):
    (folder / "real").write_text("old\n")
    (folder / "link").symlink_to("real")
    seen = []
    a = make_agent(NOWHERE, folder, lambda _: seen.append(said(a)) or agent.Verdict(True))
    edit(a, "old", "new\u202e", path="link")
    assert str(folder / "real") in seen[0] and "  -old\n  +new\\u202e\n" in seen[0]


def test_a_diff_of_long_texts_takes_time_in_proportion_to_them(a):
    """Each of these would take hours if every line were compared with every other."""
    many = ["same"] * 300_000
    mixed = [line for i in range(150_000) for line in ("same", f"new {i}")]
    diff = agent.changed_lines(many, mixed)
    assert Counter(line[0] for line in diff)["+"] >= 150_000
    assert len(agent.changed_lines([*many, "old", *many], [*many, "new", *many])) == 6
    assert len(agent.changed_lines(["x" * 5_000_000 + "a"], ["x" * 5_000_000 + "b"])) == 2
    for size in (1_000, 40_000):  # no line is rare, and none is everywhere
        one, two = ([str(i * step % size % 133) for i in range(size)] for step in (7919, 31))
        assert agent.changed_lines(one, two)


LINES = st.lists(st.sampled_from(["a", "b", "", "-", "+ c"]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(LINES, LINES)
def test_a_diff_takes_away_and_adds_all_that_differs(before, after):
    lines = agent.changed_lines(before, after)
    gone, new = (Counter(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    assert not gone - Counter(before)
    assert Counter(before) - gone + new == Counter(after)
    assert (lines == []) == (before == after)
    rest = iter(before)
    assert all(line[1:] in rest for line in lines if line[0] in " -")


# ================================ Inside and outside ================================


@pytest.fixture
def project(tmp_path):
    """A project, a neighbour whose name begins like it, and links to what lies outside."""
    project = tmp_path.resolve() / "proj"
    outside = project.with_name("outside")
    secret = project.with_name("proj-secret")
    for place in (project / "sub", outside, secret):
        place.mkdir(parents=True)
    (outside / "s.txt").write_text("secret\n")
    (secret / "s.txt").write_text("secret\n")
    (project / "link").symlink_to(outside)
    (project / "file-link").symlink_to(outside / "s.txt")
    (project / "dangling").symlink_to(outside / "new.txt")
    (project / "chain").symlink_to("link")
    (project / "inner-link").symlink_to("sub")
    return project


def contents(project):
    """All files around the project."""
    files = [path for path in project.parent.rglob("*") if path.is_file()]
    return {path: path.read_text() for path in files if not path.is_relative_to(project)}


def outside_of(project):
    return [
        "../proj-secret/s.txt",
        f"{project}-secret/s.txt",
        "sub/../../x",
        "link/new.txt",
        "link/s.txt",
        "file-link",
        "dangling",
        "chain/deep/new.txt",
        "..",
        "./a/../../../etc/hostname",
        "/etc/hostname",
        "/proc/self/environ",
        "inner-link/../../x",
        "link/../outside/s.txt",
    ]


def test_file_tools_stay_inside(project):
    """Neither reading nor writing nor editing gets out; the refusal says why."""
    before = contents(project)
    a = make_agent(NOWHERE, project)
    for path in outside_of(project):
        for name, more in FILE_CALLS.items():
            sentence = refused(a, name, path=path, **more)
            assert path in sentence and f"outside of {project}" in sentence
    assert contents(project) == before and "secret\n" not in said(a)


def test_a_project_behind_a_link_is_inside(project):
    """Started through a linked directory: its files by all their names, links that stay inside."""
    door = project.with_name("door")
    door.symlink_to(project)
    a = make_agent(NOWHERE, door)
    paths = ["a.txt", "new/deep/b.txt", f"{door}/c.txt", f"{project}/d.txt", "inner-link/e.txt"]
    paths += ["sub/../f.txt", "../proj/g.txt"]
    for path in paths:
        use(a, "write_file", path=path, content="mine")
        edit(a, "mine", "yours", path=path)
        assert use(a, "read_file", path=path) == "yours"
    assert sorted(p.stem for p in project.rglob("?.txt")) == list("abcdefg")


def test_a_link_that_appears_later_is_seen(project):
    before = contents(project)
    a = make_agent(NOWHERE, project)
    use(a, "write_file", path="sub/s.txt", content="mine")
    use(a, "read_file", path="sub/s.txt")
    (project / "sub/s.txt").unlink()
    (project / "sub").rmdir()
    (project / "sub").symlink_to("../outside")
    refused(a, "read_file", path="sub/s.txt")
    refused(a, "write_file", path="sub/s.txt", content="x")
    refused(a, "edit_file", path="sub/s.txt", old_text="secret", new_text="x")
    assert contents(project) == before


def test_the_record_can_be_read_but_only_its_notes_can_be_written(a, folder):
    (folder / ".transcripts").mkdir()
    (folder / ".transcripts/1.jsonl").write_text("{}\n")
    (folder / "door").symlink_to(".transcripts")
    for path in (".transcripts/1.jsonl", "door/1.jsonl", "./x/../.transcripts/1.jsonl"):
        assert use(a, "read_file", path=path) == "{}" or "x/" in path
        assert "record" in refused(a, "write_file", path=path, content="{}\n{}\n")
        assert "record" in refused(a, "edit_file", path=path, old_text="{}", new_text="[]")
    refused(a, "write_file", path=".transcripts/new", content="x")
    use(a, "write_file", path=".transcripts/MEMORY.md", content="Tests need make.\n")
    edit(a, "make", "ninja", path="door/MEMORY.md")
    assert (folder / ".transcripts/MEMORY.md").read_text() == "Tests need ninja.\n"
    assert (folder / ".transcripts/1.jsonl").read_text() == "{}\n"


# ================================ Calls that are not right ================================

GOOD = {
    "bash": {"command": "touch b.txt"},
    "read_file": {"path": "a.txt"},
    "write_file": {"path": "b.txt", "content": "b"},
    "edit_file": {"path": "a.txt", "old_text": "alpha", "new_text": "beta"},
    "compact": {},
}
WRONG = {
    "string": (5, ["x"], {"x": 1}, True),
    "integer": ("10", [1], {}, True, 1.5),
    "number": ("10", [1], {}, True),
    "boolean": ("yes", 1, [True], {}),
}


@pytest.mark.parametrize("name", agent.TOOLS)
def test_an_argument_that_is_missing_or_wrong_is_named_with_its_type(a, folder, name):
    (folder / "a.txt").write_text("alpha\n")
    schema = agent.TOOLS[name].description(name)["input_schema"]
    for parameter, described in schema["properties"].items():
        wrong = [{**GOOD[name], parameter: value} for value in WRONG[described["type"]]]
        if parameter in schema["required"]:
            wrong.append({key: value for key, value in GOOD[name].items() if key != parameter})
            wrong.append({**GOOD[name], parameter: None})
        for arguments in wrong:
            sentence = refused(a, name, **arguments)
            assert parameter in sentence and described["type"] in sentence
    assert os.listdir(folder) == ["a.txt"] and (folder / "a.txt").read_text() == "alpha\n"


def test_what_is_no_object_has_no_arguments(serve, folder):
    """What came is complete JSON, so the model is told what is missing; the next call runs."""
    odd = ["", "null", "[]", "7", json.dumps(json.dumps({"command": "touch ran"}))]
    calls = [call("bash", raw=raw) for raw in odd]
    api = serve([Reply(*calls, call("bash", {"command": "echo fine"}), chunk=100), "Done."])
    assert make_agent(api, folder).run("Work.") == "Done."
    *bad, good = results(api.requests[1].messages)
    assert len(bad) == len(odd) and good["content"].startswith("fine")
    for answer in bad:
        assert answer["is_error"] and "command" in answer["content"]
        assert "string" in answer["content"]
    assert not (folder / "ran").exists()


def test_arguments_that_the_sdk_cannot_read_in_pieces_end_neither_run_nor_program(serve, folder):
    """An object in a string is complete JSON, and no beginning of it is."""
    odd = call("bash", raw=json.dumps(json.dumps({"command": "touch ran"})))
    api = serve([Reply(odd), "Done.", "Done."])
    assert make_agent(api, folder).run("Work.") == "Done."
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("number", ["1e999", "NaN"])
def test_a_number_that_json_cannot_hold_does_not_stay_in_the_way(serve, folder, number):
    raw = f'{{"command": "echo fine", "timeout": {number}}}'
    api = serve([Reply(call("bash", raw=raw)), "Done.", "Still here."])
    a = make_agent(api, folder)
    with contextlib.suppress(agent.Stopped):
        a.run("Work.")
    a.run("Are you there?")
    assert "Are you there?" in texts(api.requests[-1].messages[-1:])


def test_an_unknown_argument_does_no_harm_and_null_is_none(a, folder):
    (folder / "a.txt").write_text("alpha\n")
    assert use(a, "read_file", path="a.txt", mood="fine", limit=None) == "alpha"
    use(a, "edit_file", **GOOD["edit_file"], replace_all=None, mood="fine")
    assert (folder / "a.txt").read_text() == "beta\n"


def test_a_whole_number_is_a_number(a):
    def arguments(**given):
        return agent.TOOLS["bash"].checked({"name": "bash", "input": given})

    assert arguments(command="ls", timeout=10) == {"command": "ls", "timeout": 10}
    assert arguments(command="ls", timeout=0.5) == {"command": "ls", "timeout": 0.5}
    assert arguments(command="ls") == {"command": "ls"}


def test_a_path_of_a_megabyte_is_a_short_error(serve, folder):
    path = {"path": "p" * 1_000_000}
    calls = [call("read_file", path), call("write_file", {**path, "content": "x"})]
    api = serve([Reply(*calls, chunk=100_000), "Done."])
    a = make_agent(api, folder, threshold=0)
    assert a.run("Work.") == "Done."
    for answer in results(api.requests[1].messages):
        assert answer["is_error"] and len(answer["content"]) < 2000
    assert len(said(a)) < 5000


def test_an_argument_larger_than_the_context_is_no_dead_end(serve, folder):
    """The conversation goes on in a bounded number of requests and tokens."""

    def answer(request):
        if is_summary(request):
            return "SUMMARY"
        if results(request.messages) or "SUMMARY" in texts(request.messages):
            return "Done."
        return Reply(call("read_file", {"path": "p" * 400_000}), chunk=100_000)

    api = serve(answer)
    a = make_agent(api, folder, threshold=20_000)
    assert [a.run("Work."), a.run("More.")] == ["Done.", "Done."]
    assert len(api.requests) <= 8
    assert len(json.dumps(api.requests[-1].body)) < 1.2 * 20_000 * 4


def test_an_unknown_tool_is_answered_with_the_names_of_the_real_ones(serve, folder):
    names = ["Bash", "run_bash", "str_replace_editor", "", "no such tool", "b" * 300]
    bad = [call(name, {"command": "touch bad"}) for name in names]
    good = call("bash", {"command": "touch good; echo fine"})
    api = serve([Reply(*bad, good), "Done."])
    assert make_agent(api, folder).run("Work.") == "Done."
    *answers, last = results(api.requests[1].messages)
    assert len(answers) == len(names) and last["content"].startswith("fine")
    for answer in answers:
        assert answer["is_error"] and all(tool in answer["content"] for tool in agent.TOOLS)
    assert (folder / "good").exists() and not (folder / "bad").exists()


def odd_tool(agent: agent.Agent, how: str, often: int = 1) -> str:
    """A tool of
    your own."""
    raise {"silent": RuntimeError(), "long": KeyError("x" * 9999), "odd": OSError("\ud800")}[how]


def test_a_tool_that_fails_unforeseen_is_an_error_result_and_the_batch_goes_on(serve, folder):
    agent.TOOLS["odd"] = agent.Tool(odd_tool, "how")
    try:
        calls = [call("odd", {"how": how}) for how in ("silent", "long", "odd")]
        calls += [call("write_file", {"path": "/proc/version", "content": "x"})]
        api = serve([Reply(*calls, call("bash", {"command": "echo still-here"})), "Done."])
        assert make_agent(api, folder).run("Work.") == "Done."
    finally:
        del agent.TOOLS["odd"]
    *bad, good = results(api.requests[1].messages)
    assert good["content"].startswith("still-here") and not good.get("is_error")
    assert len(bad) == 4
    for answer in bad:
        assert answer["is_error"] and 0 < len(answer["content"]) < 1100
        assert "Traceback" not in answer["content"]


def test_a_tool_is_described_by_its_signature_and_its_docstring():
    assert agent.Tool(odd_tool, "how").description("odd") == {
        "name": "odd",
        "description": "A tool of your own.",
        "input_schema": {
            "type": "object",
            "properties": {"how": {"type": "string"}, "often": {"type": "integer"}},
            "required": ["how"],
        },
    }


def test_a_tool_may_name_a_type_that_is_known_only_to_a_type_checker(a, monkeypatch):
    def shout(agent: Agent, words: str, loud: bool = False) -> str:
        """Shout."""
        return words.upper() + "!" * loud

    monkeypatch.setitem(agent.TOOLS, "shout", agent.Tool(shout, "words"))
    schema = agent.TOOLS["shout"].description("shout")["input_schema"]
    assert schema["properties"] == {"words": {"type": "string"}, "loud": {"type": "boolean"}}
    assert use(a, "shout", words="hello", loud=True) == "HELLO!"
    assert "a string" in refused(a, "shout", words=7)


# ================================ For any file ================================

LETTERS = st.text(st.sampled_from("ab\n \u00e9\u20ac\U0001f600"), max_size=6)
PIECES = st.one_of(
    LETTERS.map(str.encode),
    st.sampled_from([b"\r\n", b"\n", b"\r", b"\xff", b"\xe9", b"a", b"ab\r\n"]),
    st.binary(max_size=3),
)
FILES = st.builds(
    lambda mark, parts: mark + b"".join(parts),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(PIECES, max_size=10),
)


class Place:
    """A working directory with one file, behind a link or not, and nothing else in it."""

    def __init__(self, root: str, data: bytes, linked: bool = False) -> None:
        self.folder = Path(root).resolve()
        self.file = self.folder / ("real" if linked else "file")
        self.file.write_bytes(data)
        if linked:
            (self.folder / "file").symlink_to("real")
        self.names = sorted(os.listdir(self.folder))
        self.agent = make_agent(NOWHERE, self.folder)

    def call(self, name: str, **arguments: Any) -> bool:
        """Was it done? In any case, nothing is left behind."""
        _, is_error = result(self.agent, name, path="file", **arguments)
        assert sorted(os.listdir(self.folder)) == self.names
        assert len(self.names) == 1 or (self.folder / "file").is_symlink()
        return not is_error


def places(data: bytes, old: bytes) -> list[tuple[int, int]]:
    """Where `old` stands in `data` if CRLF counts as a newline: start and end of each."""
    starts, kept, at = [], bytearray(), 0  # where the byte kept[i], with its CR, begins in data
    while at < len(data):
        starts.append(at)
        at += data[at : at + 2] == b"\r\n"
        kept.append(data[at])
        at += 1
    starts.append(len(data))
    found = [i for i in range(len(kept) - len(old) + 1) if kept[i : i + len(old)] == old]
    return [(starts[i], starts[i + len(old)]) for i in found]


@settings(max_examples=80, deadline=None)
@given(st.data(), FILES, FILES, LETTERS, LETTERS, st.booleans())
def test_an_edit_changes_the_matched_bytes_and_no_others(data, before, after, old, new, linked):
    """One match is replaced, whatever the bytes around it; else the file is as it was.

    What is next to a CR that ends no line may be refused, too: it could make a line end of it.
    """
    crlf = data.draw(st.booleans())
    place = old.replace("\n", "\r\n") if crlf else old
    content = before + place.encode() + after
    found = places(content, old.encode()) if old else []
    with tempfile.TemporaryDirectory() as root:
        place = Place(root, content, linked)
        done = place.call("edit_file", old_text=old, new_text=new)
        now = place.file.read_bytes()
    if not done:
        foreign = not is_utf8(content) and not new.isascii()
        ends = [content[start:end].count(b"\r\n") in (0, old.count("\n")) for start, end in found]
        lone = b"\r" in content.replace(b"\r\n", b"")
        assert now == content and (ends != [True] or old == new or foreign or lone)
        return
    [(start, end)] = found
    rest = len(content) - end
    put = now[start : len(now) - rest]
    assert old != new and now[:start] == content[:start]
    assert now[len(now) - rest :] == content[end:]
    assert put.replace(b"\r\n", b"\n") == new.encode()
    if content.count(b"\r\n") in (0, content.count(b"\n")):  # the file has one style
        assert put.count(b"\r\n") == (put.count(b"\n") if b"\r\n" in content else 0)


@settings(max_examples=60, deadline=None)
@given(FILES, st.text(st.characters(exclude_categories=["Cs"])), st.booleans(), st.booleans())
def test_a_write_stores_exactly_its_content_or_nothing(before, content, linked, meanwhile):
    """What was read, and is text, is replaced; what someone else wrote in between stays."""
    with tempfile.TemporaryDirectory() as root:
        place = Place(root, before, linked)
        known = place.call("read_file") and is_utf8(before)
        theirs = before + b"meanwhile" if meanwhile else before
        place.file.write_bytes(theirs)
        done = place.call("write_file", content=content)
        assert done == (not theirs or (known and not meanwhile))
        assert place.file.read_bytes() == (content.encode() if done else theirs)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("ab \u20ac\u2028\x0c", max_size=5), min_size=1, max_size=30),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.integers(1, 9),
)
@example(["", ""], "\n", True, 1)
def test_pages_of_any_size_add_up_to_the_file(lines, end, ends_in_newline, limit):
    """Reading on where each page says gives every line once; a file that is one page is known."""
    ends_in_newline |= lines[-1] == ""  # an empty last line exists only if a newline ends it
    with tempfile.TemporaryDirectory() as root:
        place = Place(root, (end.join(lines) + end * ends_in_newline).encode())
        pages, offset = [], 1
        while offset:
            page = use(place.agent, "read_file", path="file", offset=offset, limit=limit)
            cut = re.search(r"\n\[[^\n]*offset=(\d+)[^\n]*\]$", page)
            body = page[: cut.start()] if cut else page
            wanted = "\n".join(lines[offset - 1 : offset - 1 + limit])
            assert body == wanted or (not wanted.strip("\n") and "empty" in body)
            pages.append(offset)
            offset = int(cut[1]) if cut else 0
        assert pages == list(range(1, len(lines) + 1, limit))
        assert place.call("write_file", content="x") is (len(pages) == 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["read", "write", "edit", "user", "rename"]), max_size=8))
def test_no_order_of_calls_and_changes_loses_what_the_user_typed(steps):
    """A line that the user added, and that the model has not read since, is never gone."""
    with tempfile.TemporaryDirectory() as root:
        place = Place(root, b"mark 0\n")
        place.call("read_file")
        unseen: list[str] = []
        for count, step in enumerate(steps, 1):
            now = place.file.read_text()
            if step == "read":
                assert place.call("read_file")
                unseen = []
            elif step == "write":
                assert place.call("write_file", content=f"mark {count}\n") == (not unseen)
            elif step == "edit":
                mark = re.search(r"mark \d+\n", now)[0]
                assert place.call("edit_file", old_text=mark, new_text=f"mark {count}\n")
            else:
                unseen.append(f"user {count}\n")
                place.file.write_text(now + unseen[-1])
                if step == "rename":  # as editors save: a new file takes the place of the old one
                    (place.folder / "saved").write_text(place.file.read_text())
                    (place.folder / "saved").replace(place.file)
            assert all(line in place.file.read_text() for line in unseen)
