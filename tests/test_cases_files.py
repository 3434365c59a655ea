"""The file tools, case by case: rows 4-1 to 4-14 of the public bug reports; then, for random files, what an edit
leaves alone."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import anthropic  # noqa: F401 - so that no clock below counts the import
import pytest
from harness import agent, ask, results, session
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages_api import Reply, call

NOWHERE = SimpleNamespace(url="http://127.0.0.1:9")  # for sessions that only call tools


@pytest.fixture
def folder(tmp_path):
    """A working directory whose path has no links in it."""
    (tmp_path / "work").mkdir()
    return (tmp_path / "work").resolve()


@pytest.fixture
def tool(folder):
    """tool("read_file", path=...): the text that the tool returns; what it refuses is raised."""
    s = session(NOWHERE, folder)
    return lambda name, **arguments: agent.TOOL_HANDLERS[name](s, **arguments)


def batch(serve, cwd, *calls):
    """The results of (name, arguments) pairs, run in one batch of the real loop."""
    api = serve([Reply(*[call(name, arguments) for name, arguments in calls]), "Done."])
    assert ask(session(api, cwd), "Go.") == "Done."
    answers = results(api.requests[-1].messages)
    assert len(answers) == len(calls)
    return answers


def refused(tool, name, **arguments):
    """The sentence with which the tool refuses the call."""
    with pytest.raises((ValueError, OSError)) as error:
        tool(name, **arguments)
    return str(error.value)


def edited(tool, folder, data, old, new, **more):
    """The bytes of a file after one edit."""
    (folder / "file").write_bytes(data)
    tool("edit_file", path="file", old_text=old, new_text=new, **more)
    return (folder / "file").read_bytes()


# ---- 4-1: more than one match ----

CONF = "def a():\n    retry = 3\n\ndef b():\n    retry = 3\n\ndef c():\n    retry = 3\n"


def test_text_that_occurs_three_times_is_not_replaced(serve, folder):
    """Case 4-1. The error says how many and on which lines; only replace_all replaces them."""
    (folder / "conf.py").write_text(CONF)
    once = {"path": "conf.py", "old_text": "retry = 3", "new_text": "retry = 5"}
    api = serve([Reply(call("edit_file", once)),
                 lambda request: Reply(call("bash", {"command": "cat conf.py"}),
                                       call("edit_file", once | {"replace_all": True})), "Done."])
    assert ask(session(api, folder), "Go.") == "Done."
    refusal, content, done = results(api.requests[-1].messages)
    assert refusal["is_error"] and re.search(r"\b3 (times|matches)", refusal["content"])
    assert re.search(r"\b2, 5(,| and) 8\b", refusal["content"])
    assert "more" in refusal["content"] and "replace_all" in refusal["content"]
    assert content["content"].startswith(CONF)
    assert not done.get("is_error") and re.search(r"\b3\b", done["content"])
    assert (folder / "conf.py").read_text() == CONF.replace("retry = 3", "retry = 5")


def test_overlapping_matches_count(tool, folder):
    """Case 4-1: which of the two is meant?"""
    (folder / "file").write_bytes(b"x\naaa\n")
    assert re.search(r"\b2\b", refused(tool, "edit_file", path="file", old_text="aa", new_text="b"))
    assert (folder / "file").read_bytes() == b"x\naaa\n"


def test_replace_all_says_how_many_it_replaced(tool, folder):
    """Case 4-1: five places where the text stands, overlapping ones counted, but only three replacements."""
    (folder / "file").write_bytes(b"aaaaa b aa\n")
    done = tool("edit_file", path="file", old_text="aa", new_text="X", replace_all=True)
    assert (folder / "file").read_bytes() == b"XXa b X\n"
    assert re.search(r"\b3 ", done) and not re.search(r"\b5 ", done)


# ---- 4-2: line ends ----

@pytest.mark.parametrize(("data", "old", "new", "expected"), [
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
    (b"a\nb\nc", "c", "C", b"a\nb\nC"),
    (b"a\nb\nc", "a", "A", b"A\nb\nc"),
    (b"a\nb\nc", "b\n", "B\n", b"a\nB\nc"),
    (b"a\nb\n", "a\r\nb", "A\r\nB", b"A\nB\n"),
    (b"a\r\nb", "b", "b\n", b"a\r\nb\r\n"),
])
def test_an_edit_changes_only_the_bytes_of_its_lines(tool, folder, data, old, new, expected):
    """Case 4-2: CRLF, mixed, lone CR, no newline at the end; inserted lines take the style around them."""
    assert edited(tool, folder, data, old, new) == expected


def test_a_write_stores_exactly_the_line_ends_that_were_given(serve, folder):
    """Case 4-2."""
    contents = ["a\r\nb\r\n", "a\r\nb\nc\rd", "a\n", "\n\n", "", "a\r"]
    answers = batch(serve, folder, *[("write_file", {"path": f"f{i}", "content": each})
                                     for i, each in enumerate(contents)])
    assert [answer["content"] for answer in answers if answer.get("is_error")] == []
    assert [(folder / f"f{i}").read_bytes().decode() for i in range(len(contents))] == contents


# ---- 4-3: other encodings ----

@pytest.mark.parametrize("data", [
    b"# caf\xe9 \xfc\xdf\r\nname = one\r\n# \xa0\n",
    "# \u4e2d\u6587\u6ce8\u91ca\nname = one\n# \u6c49\u5b57\n".encode("gbk"),
    "# \u65e5\u672c\u8a9e\nname = one\n".encode("shift_jis"),
    "# caf\u00e9\nname = one\n".encode("utf-16"),
    b"# good \xc3\xa9, stray \xff\nname = one\n",
    b"\xef\xbb\xbf# \xff\nname = one\n",
], ids=["latin-1", "gbk", "shift-jis", "utf-16", "stray byte", "mark and stray byte"])
def test_ascii_is_edited_in_any_encoding_or_the_file_stays(tool, folder, data):
    """Case 4-3: all other bytes identical, or refused and untouched; here only UTF-16 may be refused."""
    (folder / "file").write_bytes(data)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        refused(tool, "edit_file", path="file", old_text="one", new_text="two")
        assert (folder / "file").read_bytes() == data
    else:
        tool("edit_file", path="file", old_text="one", new_text="two")
        assert (folder / "file").read_bytes() == data.replace(b"one", b"two")


def test_two_encodings_are_never_mixed_in_one_file(tool, folder):
    """Case 4-3: UTF-8 text does not go into a Latin-1 file."""
    (folder / "file").write_bytes(b"# caf\xe9\nname = one\n")
    assert "UTF-8" in refused(tool, "edit_file", path="file", old_text="one", new_text="na\u00efve")
    assert (folder / "file").read_bytes() == b"# caf\xe9\nname = one\n"


def test_a_replacement_character_is_a_character_like_any_other(tool, folder):
    """Case 4-3, the reverse: a file that holds U+FFFD is UTF-8 and takes any text."""
    data = "# shown as \ufffd\nname = one\n".encode()
    assert edited(tool, folder, data, "one", "\u00e9l\u00e8ve") == data.replace(b"one", "\u00e9l\u00e8ve".encode())


# ---- 4-4: empty old text ----

def test_an_empty_old_text_is_refused(serve, folder):
    """Case 4-4."""
    (folder / "full").write_bytes(b"some text\n")
    (folder / "empty").write_bytes(b"")
    answers = batch(serve, folder, *[("edit_file", {"path": path, "old_text": "", "new_text": "X"})
                                     for path in ("full", "empty", "missing")])
    assert [answer.get("is_error") for answer in answers] == [True] * 3
    assert all("empty" in answer["content"] for answer in answers[:2])
    assert (folder / "full").read_bytes() == b"some text\n" and (folder / "empty").read_bytes() == b""
    assert not (folder / "missing").exists()


# ---- 4-5: the file changed on disk meanwhile ----

OLD, USERLINE = "one\ntwo\nthree\n", "typed by the user\n"


def test_a_change_by_the_user_survives_an_edit_and_stops_a_write(serve, folder):
    """Case 4-5: (a) an edit elsewhere keeps the user's line; (b) a write is refused; after a reading it is done."""
    (folder / "a").write_text(OLD)
    (folder / "b").write_text(OLD)

    def user_types(request):
        for name in "ab":
            with open(folder / name, "a") as file:
                file.write(USERLINE)
        return Reply(call("edit_file", {"path": "a", "old_text": "two", "new_text": "TWO"}),
                     call("write_file", {"path": "b", "content": "one\nTWO\nthree\n"}))

    again = [call("read_file", {"path": "b"}), call("write_file", {"path": "b", "content": "all new\n"})]
    seen = []

    def reads_again(request):
        seen.append((folder / "b").read_text())
        return Reply(*again)

    api = serve([Reply(call("read_file", {"path": "a"}), call("read_file", {"path": "b"})), user_types, reads_again,
                 "Done."])
    assert ask(session(api, folder), "Go.") == "Done."
    edit, write, _, last = results(api.requests[-1].messages)[2:]
    assert not edit.get("is_error") and (folder / "a").read_text() == OLD.replace("two", "TWO") + USERLINE
    assert write["is_error"] and "changed on disk" in write["content"]
    assert seen == [OLD + USERLINE]
    assert not last.get("is_error") and (folder / "b").read_text() == "all new\n"


def test_a_change_of_the_same_size_and_time_is_noticed(tool, folder):
    """Case 4-5: neither size nor time of a file says that it is still the same."""
    file = folder / "file"
    file.write_text("speed = 1\n")
    before = file.stat()
    tool("read_file", path="file")
    file.write_text("speed = 2\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "changed" in refused(tool, "write_file", path="file", content="speed = 3\n")
    assert file.read_text() == "speed = 2\n"


def test_a_write_after_a_write_needs_no_reading_until_someone_else_writes(tool, folder):
    """Case 4-5: what the model wrote itself it knows."""
    tool("write_file", path="file", content="one\n")
    tool("write_file", path="file", content="two\n")
    (folder / "file").write_text("typed\n")
    assert "changed" in refused(tool, "write_file", path="file", content="three\n")
    assert (folder / "file").read_text() == "typed\n"


def test_an_edit_does_not_make_the_users_change_known(tool, folder):
    """Case 4-5, (a) and then (b): the edit kept a line that the model never saw; a write must not remove it."""
    (folder / "file").write_text(OLD)
    tool("read_file", path="file")
    (folder / "file").write_text(OLD + USERLINE)
    tool("edit_file", path="file", old_text="two", new_text="TWO")
    assert "changed" in refused(tool, "write_file", path="file", content="one\nTWO\nTHREE\n")
    assert (folder / "file").read_text() == "one\nTWO\nthree\n" + USERLINE


def test_a_write_over_a_file_that_was_never_read_says_so(tool, folder):
    """Case 4-5 (c): an existing file of 14 bytes was replaced."""
    (folder / "file").write_text(OLD)
    done = tool("write_file", path="file", content="new\n")
    assert re.search(r"(?i)replaced\b.*\b14 bytes", done) and re.search(r"\b4 bytes, 1 line", done)
    assert re.search(r"(?i)created", tool("write_file", path="deep/er/file", content="new\n"))
    assert (folder / "deep/er/file").read_text() == "new\n"


# ---- 4-6: the byte-order mark ----

def test_a_byte_order_mark_is_neither_in_the_way_nor_lost(tool, folder):
    """Case 4-6. A write stores exactly what it is given (4-2), so it never doubles the mark."""
    mark = b"\xef\xbb\xbf"
    assert edited(tool, folder, mark + b"import os\n", "import os", "import sys") == mark + b"import sys\n"
    assert tool("read_file", path="file") == "import sys"
    tool("write_file", path="file", content="\ufeffimport re\n")
    assert (folder / "file").read_bytes() == mark + b"import re\n"
    tool("write_file", path="file", content="import re\n")
    assert (folder / "file").read_bytes() == b"import re\n"


# ---- 4-10: not a plain file ----

def test_what_is_no_plain_file_is_answered_at_once_with_one_sentence(serve, folder):
    """Case 4-10."""
    os.mkfifo(folder / "fifo")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(".", os.O_RDONLY)
        os.chdir(folder)  # the path of a socket must be short
        try:
            listener.bind("socket")
        finally:
            os.fchdir(here)
            os.close(here)
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    with open(folder / "sparse", "wb") as sparse:
        sparse.truncate(3 << 30)
    (folder / "plain").write_text("plain\n")
    odd = ["fifo", "/dev/zero", "zero", "/dev/tty", "directory", "socket", "dangling", "loop", "sparse", "plain/below"]
    calls = [("read_file", {"path": path}) for path in odd]
    calls += [("edit_file", {"path": path, "old_text": "a", "new_text": "b"}) for path in odd]
    calls += [("write_file", {"path": path, "content": "x"}) for path in odd if path not in ("dangling", "sparse")]
    memory, start, answers = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), []
    worker = threading.Thread(target=lambda: answers.extend(batch(serve, folder, *calls)), daemon=True)
    worker.start()
    worker.join(20)
    assert not worker.is_alive(), "a call blocks"
    assert time.monotonic() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000  # kilobytes
    assert len(answers) == len(calls)
    for (name, arguments), answer in zip(calls, answers, strict=True):
        text = answer["content"]
        assert answer.get("is_error"), (name, arguments)
        assert len(text) < 300 and "\n" not in text, text
        assert not re.search(r"Traceback|Errno|Error\(|<class", text), text
        assert arguments["path"] in text or str(folder) in text, text
    assert all("directory" in answers[i]["content"] for i, (_, args) in enumerate(calls) if args["path"] == "directory")
    assert re.search(r"\bls\b", answers[4]["content"])
    assert (folder / "plain").read_text() == "plain\n" and (folder / "sparse").stat().st_size == 3 << 30
    assert (folder / "fifo").is_fifo() and (folder / "socket").is_socket() and (folder / "dangling").is_symlink()
    assert sorted(os.listdir(folder)) == sorted([".transcripts", "dangling", "directory", "fifo", "loop", "plain",
                                                 "socket", "sparse", "zero"])
    (folder / "sparse").unlink()


def test_a_write_through_a_dangling_link_makes_its_target(tool, folder):
    """Case 4-10: inside the working directory a link is a name like another, and stays."""
    (folder / "link").symlink_to("target")
    tool("write_file", path="link", content="text\n")
    assert (folder / "link").is_symlink() and (folder / "target").read_text() == "text\n"


# ---- 4-11: lines ----

TEN = [f"line {i}" for i in range(1, 11)]


@pytest.mark.parametrize("end", ["\n", "", "\r\n"], ids=["newline", "no newline", "CRLF"])
def test_ten_lines_are_ten_lines(tool, folder, end):
    """Case 4-11: whole, in part, and from the last line on; never a phantom line."""
    text = ("\r\n" if end == "\r\n" else "\n").join(TEN) + end
    (folder / "file").write_bytes(text.encode())
    assert tool("read_file", path="file") == "\n".join(TEN)
    assert tool("read_file", path="file", limit=99999) == "\n".join(TEN)
    first = tool("read_file", path="file", limit=3)
    assert first.startswith("\n".join(TEN[:3]) + "\n[") and "line 4" not in first
    assert re.search(r"\b3 of 10\b", first.rpartition("\n")[2]) and "offset=4" in first
    assert tool("read_file", path="file", offset=10) == "line 10"
    assert tool("read_file", path="file", offset=8, limit=3) == "\n".join(TEN[7:])
    for odd in ({"offset": 11}, {"offset": 99999}, {"offset": 0}, {"offset": -1}, {"limit": 0}, {"limit": -1}):
        assert re.search(r"\b10 lines", refused(tool, "read_file", path="file", **odd))
    tool("edit_file", path="file", old_text="line 10", new_text="last")
    assert (folder / "file").read_bytes().decode() == text.replace("line 10", "last")


def test_an_empty_file_is_said_to_be_empty(serve, folder):
    """Case 4-11: one without a byte; one that holds a single newline is no empty result either."""
    (folder / "empty").write_bytes(b"")
    (folder / "newline").write_bytes(b"\n")
    empty, newline = batch(serve, folder, ("read_file", {"path": "empty"}), ("read_file", {"path": "newline"}))
    assert "empty" in empty["content"] and not empty.get("is_error")
    assert newline["content"].strip() and not newline.get("is_error")


def test_five_thousand_lines_can_be_read_on_to_the_end(serve, folder):
    """Case 4-11: each cut reading says that it is one, and where to read on; together they are the file."""
    lines = [f"{i}: " + "x" * (i % 40) for i in range(1, 5001)]
    (folder / "file").write_text("\n".join(lines) + "\n")
    pages = []

    def read_on(request):
        last = [answer["content"] for answer in results(request.messages)][-1:]
        pages.extend(last)
        found = re.search(r"offset=(\d+)", last[0].rpartition("\n")[2]) if last else None
        return "Done." if last and not found else Reply(
            call("read_file", {"path": "file", "offset": int(found[1]) if found else 1}))

    assert ask(session(serve(read_on), folder), "Read it.") == "Done."
    assert 3 < len(pages) < 20 and max(map(len, pages)) <= 24_000
    assert all("of 5000" in page.replace("5,000", "5000").rpartition("\n")[2] for page in pages[:-1])
    assert "\n".join([page.rpartition("\n")[0] for page in pages[:-1]] + pages[-1:]) == "\n".join(lines)


@pytest.mark.parametrize("letter", ["x", "\u20ac"])
def test_a_line_of_two_megabytes_says_what_is_left_of_it_and_how_to_see_it(serve, folder, letter):
    """Case 4-11. The file that is named has all of the line."""
    line = "".join(f"{i:06d}{letter}" for i in range(290_000))
    (folder / "one line").write_text("first\n" + line + "\nlast\n", encoding="utf-8")
    cut, last = batch(serve, folder, ("read_file", {"path": "one line", "offset": 2}),
                      ("read_file", {"path": "one line", "offset": 3}))
    head, note, tail, more = cut["content"].split("\n")
    assert len(cut["content"].encode()) <= 24_000 and line.startswith(head) and line.endswith(tail)
    missing, address = re.fullmatch(r"\[\.\.\. ([\d,]+) bytes left out; the whole is in (\S+) \.\.\.\]", note).groups()
    whole = (folder / address).read_text()
    assert whole == f"{line}\n{more}" and more.endswith("read on with offset=3]") and last["content"] == "last"
    assert int(missing.replace(",", "")) == pytest.approx(len(whole.encode()) - len((head + tail + more).encode()), abs=9)


# ---- 4-12: ~ ----

def test_a_tilde_never_becomes_a_directory(serve, tmp_path, folder, monkeypatch):
    """Case 4-12."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".profile").write_text("HOMESENTINEL\n")
    monkeypatch.setenv("HOME", str(home))
    answers = batch(serve, folder, ("write_file", {"path": "~/note.txt", "content": "x"}),
                    ("read_file", {"path": "~/.profile"}),
                    ("edit_file", {"path": "~user/x", "old_text": "a", "new_text": "b"}),
                    ("write_file", {"path": "~", "content": "x"}))
    for answer in answers:
        assert answer["is_error"] and "~" in answer["content"] and "HOMESENTINEL" not in answer["content"]
        assert re.search(r"outside|not expanded|not a directory", answer["content"])
    assert os.listdir(folder) == [".transcripts"] and os.listdir(home) == [".profile"]


# ---- 4-13: characters ----

CHARACTERS = "\u2019 \u201c \u201d \u2014 \u00a0 \u202f \U0001f469\u200d\U0001f4bb \u00e9 e\u0301 \u2028 \x0c \x85 \ufeff \t."
NAMES = ["it\u2019s", "cafe\u0301", "caf\u00e9", "-rf", "--", "two\nlines", "ends in spaces  ", " starts", "a\u00a0b",
         "\u201cquoted\u201d", "$HOME", "*", "semi;colon", "back\\slash", "tab\t", "\U0001f469\u200d\U0001f4bb"]


def test_every_character_arrives_on_disk_as_it_was_given(serve, folder):
    """Case 4-13: by a write and by an edit, and a reading gives it back."""
    write, edit, read = batch(
        serve, folder, ("write_file", {"path": "written", "content": f"{CHARACTERS}\nold\n{CHARACTERS}"}),
        ("edit_file", {"path": "written", "old_text": f"old\n{CHARACTERS[:9]}", "new_text": f"new {CHARACTERS}\n"}),
        ("read_file", {"path": "written"}))
    assert not [answer for answer in (write, edit, read) if answer.get("is_error")]
    expected = f"{CHARACTERS}\nnew {CHARACTERS}\n{CHARACTERS[9:]}"
    assert (folder / "written").read_bytes() == expected.encode()
    assert read["content"] == expected


def test_every_name_that_ls_shows_works_as_it_stands(serve, folder):
    """Case 4-13: each of them is written, edited and read by that exact name."""
    calls = []
    for i, name in enumerate(NAMES):
        calls += [("write_file", {"path": name, "content": f"{i} old\n"}),
                  ("edit_file", {"path": name, "old_text": "old", "new_text": "new"}), ("read_file", {"path": name})]
    answers = batch(serve, folder, *calls)
    assert [answer["content"] for answer in answers if answer.get("is_error")] == []
    assert [answer["content"] for answer in answers[2::3]] == [f"{i} new" for i in range(len(NAMES))]
    assert sorted(os.listdir(folder)) == sorted([*NAMES, ".transcripts"])


# ---- 4-14: nothing to do ----

def test_what_cannot_be_edited_has_a_message_of_its_own(serve, folder):
    """Case 4-14: nothing to change; not found, in a file of ten lines; no such file. Nothing is written."""
    (folder / "file").write_text("\n".join(TEN) + "\n")
    os.utime(folder / "file", ns=(10**18, 10**18))
    same, typo, numbered, missing = answers = batch(
        serve, folder, ("edit_file", {"path": "file", "old_text": "line 3", "new_text": "line 3"}),
        ("edit_file", {"path": "file", "old_text": "lime 3", "new_text": "line three"}),
        ("edit_file", {"path": "file", "old_text": "3: line 3", "new_text": "line three"}),
        ("edit_file", {"path": "nosuch", "old_text": "line 3", "new_text": "line three"}))
    assert [answer.get("is_error") for answer in answers] == [True] * 4
    assert "nothing to change" in same["content"]
    assert "not found" in typo["content"] and re.search(r"\b10 lines", typo["content"])
    assert "not found" in numbered["content"]
    assert re.search(r"(?i)no such file", missing["content"]) and "nosuch" in missing["content"]
    assert len({same["content"], typo["content"], missing["content"]}) == 3
    assert (folder / "file").stat().st_mtime_ns == 10**18
    assert sorted(os.listdir(folder)) == [".transcripts", "file"]


# ---- a full disk ----

@pytest.mark.parametrize("name", ["write_file", "edit_file"])
@pytest.mark.parametrize("room", [0, 1000, 70_000])
def test_a_disk_that_fills_up_leaves_the_old_file(tool, folder, name, room):
    """Section 7, atomic: the system itself refuses to write more than `room` bytes into any file."""
    old, new = b"old\n" * 100, "new text, " * 10_000
    (folder / "file").write_bytes(old + b"end\n")
    (folder / "file").chmod(0o640)
    arguments = {"write_file": {"content": new}, "edit_file": {"old_text": "end", "new_text": new}}[name]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match="(?i)too large"):
            tool(name, path="file", **arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / "file").read_bytes() == old + b"end\n"
    assert (folder / "file").stat().st_mode & 0o7777 == 0o640
    assert os.listdir(folder) == ["file"]
    tool(name, path="file", **arguments)  # and with room again it works
    assert new.encode() in (folder / "file").read_bytes()


# ---- properties ----

LETTERS = st.text(st.sampled_from("ab\n \u00e9\u20ac\U0001f600"), max_size=6)
PIECES = st.one_of(LETTERS.map(str.encode), st.sampled_from([b"\r\n", b"\n", b"\r", b"\xff", b"\xe9", b"a", b"ab\r\n"]),
                   st.binary(max_size=3))
FILES = st.builds(lambda mark, parts: mark + b"".join(parts), st.sampled_from([b"", b"\xef\xbb\xbf"]),
                  st.lists(PIECES, max_size=10))


class Place:
    """A working directory with one file, behind a link or not, and nothing else in it."""

    def __init__(self, root, data, mode, linked):
        self.folder = Path(root).resolve()
        self.real = self.folder / ("real" if linked else "file")
        self.real.write_bytes(data)
        self.real.chmod(mode)
        if linked:
            (self.folder / "file").symlink_to("real")
        self.before = self.state()
        self.session = session(NOWHERE, self.folder)

    def state(self):
        """All that must stay: names, kinds, where links lead, mode bits."""
        return sorted((path.name, path.is_symlink() and os.readlink(path), path.stat().st_mode)
                      for path in self.folder.iterdir())

    def call(self, name, **arguments):
        """Was it done?"""
        try:
            assert isinstance(agent.TOOL_HANDLERS[name](self.session, path="file", **arguments), str)
        except (ValueError, OSError):
            return False
        return True


def places(data, old):
    """Where `old` stands in `data`, if CRLF counts as a newline: pairs of start and end, overlapping ones too."""
    starts, kept, at = [], bytearray(), 0  # starts[i]: where the byte kept[i], with its CR, begins in data
    while at < len(data):
        starts.append(at)
        at += data[at : at + 2] == b"\r\n"
        kept.append(data[at])
        at += 1
    starts.append(len(data))
    return [(starts[i], starts[i + len(old)]) for i in range(len(kept) - len(old) + 1) if kept[i : i + len(old)] == old]


def is_utf8(data):
    try:
        return bool(data.decode()) or True
    except UnicodeDecodeError:
        return False


MODES = st.sampled_from([0o600, 0o644, 0o755, 0o640, 0o700])


@settings(max_examples=150, deadline=None)
@given(st.data(), FILES, FILES, LETTERS, LETTERS, MODES, st.booleans())
def test_an_edit_changes_the_matched_bytes_and_no_others(data, before, after, old, new, mode, linked):
    """Section 7 and cases 4-1 to 4-4: exactly one match is replaced, whatever the bytes around it; else the file is
    as it was. Mode bits and links stay, and nothing is left behind in the directory."""
    ends = data.draw(st.lists(st.sampled_from([b"\n", b"\r\n"]), min_size=old.count("\n"), max_size=old.count("\n")))
    pieces = [part for pair in zip(old.encode().split(b"\n"), [*ends, b""], strict=True) for part in pair]
    content = before + b"".join(pieces) + after
    found = places(content, old.encode()) if old else []
    with tempfile.TemporaryDirectory() as root:
        place = Place(root, content, mode, linked)
        done = place.call("edit_file", old_text=old, new_text=new)
        result = place.real.read_bytes()
        assert place.state() == place.before
        if not done:
            assert result == content
            foreign = not is_utf8(content) and not new.isascii()
            assert len(found) != 1 or old == new or foreign or b"\0" in content
        else:
            [(start, end)] = found
            assert old != new
            assert result[:start] == content[:start] and result[len(result) - len(content) + end :] == content[end:]
            put = result[start : len(result) - len(content) + end]
            assert put.replace(b"\r\n", b"\n") == new.encode()
            crlf, lf = content.count(b"\r\n"), content.count(b"\n")
            if crlf in (0, lf):  # the file has one style
                assert put.count(b"\r\n") == (put.count(b"\n") if crlf else 0)


@settings(max_examples=100, deadline=None)
@given(FILES, st.text(st.characters(exclude_categories=["Cs"])), MODES, st.booleans(), st.booleans())
def test_a_write_stores_exactly_its_content(before, content, mode, linked, meanwhile):
    """Section 7 and cases 4-2, 4-5, 4-13: the bytes are those of the text; if someone else wrote in between, the
    bytes are theirs. Mode bits and links stay, and nothing is left behind in the directory."""
    with tempfile.TemporaryDirectory() as root:
        place = Place(root, before, mode, linked)
        known = place.call("read_file")
        theirs = before + b"meanwhile"
        if meanwhile:
            place.real.write_bytes(theirs)
        done = place.call("write_file", content=content)
        assert done == (not (known and meanwhile))
        assert place.real.read_bytes() == (content.encode() if done else theirs)
        assert place.state() == place.before


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab \u20ac\u2028\x0c", max_size=5), min_size=1, max_size=30), st.sampled_from(["\n", "\r\n"]),
       st.booleans(), st.integers(1, 9))
@example(["", ""], "\n", True, 1)
def test_pages_of_any_size_add_up_to_the_file(lines, end, ends_in_newline, limit):
    """Case 4-11: reading on at the offset that each cut page names gives every line once, in order."""
    ends_in_newline |= lines[-1] == ""  # an empty last line exists only if a newline ends it
    with tempfile.TemporaryDirectory() as root:
        place = Place(root, (end.join(lines) + end * ends_in_newline).encode(), 0o644, False)
        pages, offset = [], 1
        while offset:
            page = agent.TOOL_HANDLERS["read_file"](place.session, path="file", offset=offset, limit=limit)
            cut = re.search(r"\n\[[^\n]*offset=(\d+)[^\n]*\]$", page)
            body = page[: cut.start()] if cut else page
            wanted = "\n".join(lines[offset - 1 : offset - 1 + limit])
            # a page of empty lines only may be described in words
            assert body == wanted or not wanted.strip("\n") and "empty" in body
            pages.append(offset)
            offset = int(cut[1]) if cut else 0
        assert pages == list(range(1, len(lines) + 1, limit))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["read", "write", "edit", "user", "rename"]), max_size=8))
def test_no_order_of_calls_and_changes_loses_what_the_user_typed(steps):
    """Case 4-5: a line that the user added, and that the model has not read since, is never gone."""
    with tempfile.TemporaryDirectory() as root:
        place = Place(root, b"mark 0\n", 0o644, False)
        place.call("read_file")
        unseen = []
        for count, step in enumerate(steps, 1):
            now = place.real.read_text()
            if step == "read":
                assert place.call("read_file")
                unseen = []
            elif step == "write":
                assert place.call("write_file", content=f"mark {count}\n") == (not unseen)
            elif step == "edit":
                mark = re.search(r"mark \d+\n", now)
                assert mark and place.call("edit_file", old_text=mark[0], new_text=f"mark {count}\n")
            else:
                unseen.append(f"user {count}\n")
                place.real.write_text(now + unseen[-1])
                if step == "rename":  # as editors save: a new file takes the place of the old one
                    (place.folder / "saved").write_text(place.real.read_text())
                    (place.folder / "saved").replace(place.real)
            assert all(line in place.real.read_text() for line in unseen)


def test_results_of_file_tools_are_plain_json_text(serve, folder):
    """Section 7: every result is text that is not empty, whatever the file holds."""
    (folder / "odd").write_bytes(b"\xff\xfe\x01 \x1b[31m\xed\xa0\x80\n")
    (folder / "binary").write_bytes(b"\x7fELF\0\0\0")
    odd, binary = batch(serve, folder, ("read_file", {"path": "odd"}), ("read_file", {"path": "binary"}))
    assert not odd.get("is_error") and "\ufffd" in odd["content"]
    assert binary["is_error"] and "binary" in binary["content"] and "\n" not in binary["content"]
    json.dumps([odd, binary], ensure_ascii=False).encode()
