"""The person is asked before anything but reading, and sees exactly what would run."""

import re
import threading
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from harness import agent, make_agent, results, said, texts
from messages_api import Reply, call
from person import QUESTION, Person

# What no screen shows, or what turns, hides or moves other text.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    "\U000e0000-\U000e0fff]"
)
CHARACTERS = "".join(  # all blocks in which there are characters of these kinds, and some others
    chr(number)
    for start, end in (
        (0x0, 0x3200),
        (0xD7F0, 0xE010),
        (0xFA00, 0x10000),
        (0x1BC00, 0x1BCB0),
        (0x1D150, 0x1D180),
        (0x1F300, 0x1F700),
        (0xE0000, 0xE0200),
    )
    for number in range(start, end)
)
# What the agent and the line editor write of their own accord.
OWN = re.compile(
    r"\x1b\[[0-9;]*[mK]|\x1b\[\?2004[hl]|\r\n|\r(?=\x1b\[K|\x1b\[\?2004l)|(?<=2004l)\r"
)


def bash(command, **arguments):
    return call("bash", {"command": command, **arguments})


def write(path, content):
    return call("write_file", {"path": path, "content": content})


def edit(path, old, new, **arguments):
    return call("edit_file", {"path": path, "old_text": old, "new_text": new, **arguments})


def answers(api, number):
    """The results that a request holds, as texts."""
    return [result["content"] for result in results(api.requests[number].messages)]


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".transcripts")


# ================================ What is shown ================================


def test_of_all_characters_only_those_with_ink_reach_a_question_as_they_are():
    shown = agent.visible(CHARACTERS, exact=True)
    assert HIDDEN.findall(shown) == []
    assert {c for c in set(shown) if not c.isprintable()} == {"\n", "\t"}
    assert (
        agent.visible("l\u3164s \u115f\u034f\u2800", exact=True)
        == "l\\u3164s \\u115f\\u034f\\u2800"
    )
    words = "naïve 你好 😀 שלום مرحبا ls -l | grep 'a\\b'\n\tx"
    assert agent.visible(words, exact=True) == words


def test_text_stays_readable_and_what_drives_a_terminal_becomes_escapes():
    unsafe = {"Cc", "Cf", "Cs", "Zl", "Zp", "Co", "Cn"}
    left = {c for c in set(agent.visible(CHARACTERS)) if unicodedata.category(c) in unsafe}
    assert left == {"\n", "\t", "\u200c", "\u200d"}
    words = "👩\u200d💻 ❤️ می\u200cخواهم a\u00a0b\u3000c\n\t"
    assert agent.visible(words) == words
    assert agent.visible("\x1b]0;t\x07 \x9b2J \u202eabc") == "\\x1b]0;t\\x07 \\x9b2J \\u202eabc"


LINES = [f"echo row {i}" for i in range(1, 36)]
DISGUISED = [  # what the model wants; what the person must be able to read
    (bash("rm notes #\r\x1b[2Kdate"), ["rm notes #\\r\\x1b[2Kdate"]),
    (bash("rm a # \u202etxt.b\u2066"), ["rm a # \\u202etxt.b\\u2066"]),
    (
        bash("d\u200bate\U000e0101; r\u2060m\xad x\ufeff"),
        ["d\\u200bate\\U000e0101; r\\u2060m\\xad x"],
    ),
    (bash("rm \u3164\u115f\u034f\u2800"), ["rm \\u3164\\u115f\\u034f\\u2800"]),
    (bash("rm e\u200dx\u200c"), ["rm e\\u200dx\\u200c"]),
    (bash("date" + " " * 280 + "; rm x"), ["date" + " " * 280 + "; rm x"]),
    (bash("\n".join(LINES)), LINES),
    (
        bash("date\x0b\x0c\x08\x9b2J\u2028\u0085rm x"),
        ["date\\x0b\\x0c\\x08\\x9b2J\\u2028\\x85rm x"],
    ),
    (bash("date", timeout=77), ["timeout: 77"]),
    (
        write("n\x1b[2K\u202ed.txt", "x\x1b]0;t\x07\r\u202ey"),
        [
            "> write_file: n\\x1b[2K\\u202ed.txt",
            "+x\\x1b]0;t\\x07\\r\\u202ey  (no newline at the end)",
        ],
    ),
    (edit("f", "old", "n\u202ew\x1b[8m"), ["-old", "+n\\u202ew\\x1b[8m"]),
    (edit("f", "o", "0", replace_all=True), ["-old", "-two", "+0ld", "+tw0"]),
]


def test_what_is_shown_at_the_question_is_what_would_run(serve, tmp_path):
    (tmp_path / "f").write_text("old\ntwo\n")
    api = serve([Reply(*[wanted for wanted, _ in DISGUISED]), "the end"])
    person = Person(api, tmp_path, size=(90, 100))
    person.types("go\r")
    missing = []
    for number, (_, parts) in enumerate(DISGUISED, 1):
        person.question(number)
        missing += [part for part in parts if part not in person.shown()]
        person.screen.reset()
        person.types("n\r")
    person.comes("the end")
    person.prompt()
    person.leave()
    assert missing == []
    assert HIDDEN.findall(OWN.sub("", person.raw)) == []
    assert answers(api, 1) == ["Not run: the user said no. "] * len(DISGUISED)
    assert files(tmp_path) == ["f"]


@pytest.mark.parametrize(
    "path", ["d" * 150 + "/" + "e" * 60 + "/.profile", "notes.txt" + " " * 90 + "/.profile"]
)
def test_the_question_shows_the_whole_path_of_a_file(serve, tmp_path, path):
    person = Person(serve([Reply(write(path, "x")), "the end"]), tmp_path)
    person.types("go\r")
    person.question()
    assert path in person.shown()
    person.types("n\r")
    person.comes("the end")
    person.leave()


def test_the_question_shows_what_would_change_in_the_file_that_would_change(serve, tmp_path):
    (tmp_path / "f").write_text("one\ntwo\nthree\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/config").write_bytes(b"size = 1\nname = \xfc\n")
    (tmp_path / "notes.md").symlink_to(".hidden/config")
    changes = [
        (edit("f", "two", "2"), [" one", "-two", "+2", " three"]),
        (write("new", "a\n\nb\n"), ["+a", "+", "+b"]),
        (
            edit("notes.md", "size = 1", "size = 2"),
            [
                f"it leads to {tmp_path}/.hidden/config",
                "-size = 1",
                "+size = 2",
                " name = \\xfc",
            ],
        ),
    ]
    person = Person(serve([Reply(*[c for c, _ in changes]), "the end"]), tmp_path, size=(40, 200))
    person.types("go\r")
    colours = {"-": "red", "+": "green"}
    for number, (_, lines) in enumerate(changes, 1):
        person.question(number)
        *_, call_row = (y for y, row in enumerate(person.rows()) if row.startswith("> "))
        shown = range(call_row + 1, person.screen.cursor.y)
        assert [person.rows()[y] for y in shown] == ["  " + line for line in lines]
        seen = [person.screen.buffer[y][2].fg for y in shown]
        assert seen == [colours.get(line[0], "default") for line in lines]
        person.types("y\r")
    person.comes("the end")
    person.leave()
    assert (tmp_path / "f").read_text() == "one\n2\nthree\n"
    assert (tmp_path / ".hidden/config").read_bytes() == b"size = 2\nname = \xfc\n"
    assert (tmp_path / "notes.md").is_symlink()


DRIVING = [
    "\x1b]52;c;b3duZWQ=\x07",  # writes to the clipboard
    "\x1b]2;title\x1b\\",
    "\x1b]8;;http://evil.example/\x07",
    "\x1b[2J",
    "\x1b[8m",
    "\x1b[?1003h",
    "\x1b[6n",
    "\x1bc",
    "\x9b2J",
    "\x9d0;title\x9c",
    "\x07",
]
READABLE = "naïve 你好 😀 👩\u200d💻 ❤️ שלום مرحبا"


def test_nothing_that_a_model_or_a_file_says_drives_the_terminal(serve, tmp_path):
    evil = "begin " + " ".join(f"{i}{mark}" for i, mark in enumerate(DRIVING)) + " finish"
    (tmp_path / "evil.txt").write_text(evil + "\n" + READABLE + "\n", "utf-8")
    (tmp_path / "raw.txt").write_bytes(b"raw \x9b2J \x9d0;title\x07 bytes\n")
    calls = [
        call("read_file", {"path": "evil.txt"}),
        bash("cat evil.txt raw.txt; until [ -e seen ]; do sleep 0.02; done"),
        call("read_file", {"path": "raw.txt"}),
        call("no" + evil, {}),
        call("read_file", {"path": evil}),
    ]
    said_first = evil + "\n\ttabbed\n" + READABLE + " from the model\n"
    api = serve([Reply(said_first, *calls, chunk=1), evil + " the end"])
    person = Person(api, tmp_path, "-y", size=(80, 100))
    person.types("go\r")
    person.saw(r"raw \S+ [^\r\n]*\(\d+ s\)")  # the sign of life, with the last line
    (tmp_path / "seen").touch()
    person.comes("the end")
    person.prompt()
    person.leave()
    assert set(HIDDEN.findall(OWN.sub("", person.raw))) <= {"\u200d", "\ufe0f"}  # of the emoji
    assert [mark for mark in DRIVING if mark in person.raw] == []
    lines = [line.rstrip() for line in person.raw.replace("\r\n", "\n").split("\n")]
    assert READABLE + " from the model" in lines and "\ttabbed" in lines
    assert sum(READABLE in line for line in lines) >= 3  # the model's, the file's, the command's
    assert all(part in person.written() for part in ("finish the end", "52;c;b3duZWQ=", "bytes"))


def test_the_answer_of_one_task_is_made_visible_on_a_terminal(serve, tmp_path):
    evil = "begin " + " ".join(DRIVING) + " the end"
    seen = threading.Event()
    api = serve(lambda request: evil if seen.wait(60) else "too late")
    person = Person(api, tmp_path, "-p", "go", at="reading the prompt (", size=(40, 300))
    seen.set()
    person.gone()
    assert [mark for mark in DRIVING if mark in person.raw] == []
    answer, status = person.rows()  # and nothing is left of the waiting
    assert answer == agent.visible(evil) and " of 100k tokens; in " in status


# ================================ What is asked ================================


def test_only_yes_is_yes(serve, tmp_path):
    """Enter, Ctrl-D, other words, also a command of the prompt, and Ctrl-C are no."""
    no = ["\r", "\x04", "yesterday\r", "/yes\r", "nay\r", "No, use tabs\r"]
    calls = [bash(f"touch q{i}") for i in range(len(no))]
    api = serve(["wait", Reply(*calls), Reply(bash("touch a"), bash("touch b")), "ok"])
    person = Person(api, tmp_path)
    person.ask("hello", "wait")
    person.types("go\r")
    for number, answer in enumerate(no, 1):
        person.question(number)
        person.types(answer)
    person.question(len(no) + 1)
    person.types("\x03")
    person.prompt()
    person.ask("go on")
    person.leave()
    assert files(tmp_path) == []
    given = answers(api, 3)
    assert [text.removeprefix("Not run: the user said no. ") for text in given[: len(no)]] == [
        "",
        "",
        "yesterday",
        "/yes",
        "nay",
        "use tabs",
    ]
    assert [text.split(":")[0] for text in given[len(no) :]] == [
        "Not run, or not to its end",
        "Not run",
    ]
    assert texts(api.requests[3].messages[-1:]).endswith("go on")


VARIANTS = [
    "make test && touch p1",
    "make test; touch p2",
    "make test\ntouch p3",
    "make test $(touch p4)",
    "make test > p5",
    "make tests",
    "make  test",
    "/usr/bin/make test",
    "bash -c 'make test'",
    "make test ",
    " make test",
]


def test_always_means_this_very_command_or_this_file_tool(serve, tmp_path):
    again = [bash("make test"), write("b", "2"), edit("b", "2", "3")]
    others = [bash("make test", timeout=99), *map(bash, VARIANTS)]
    api = serve(
        [Reply(bash("make test"), write("a", "1")), Reply(*again), Reply(*others), "the end"]
    )
    person = Person(api, tmp_path, size=(90, 100))
    person.types("go\r")
    for number, which in enumerate(["this: ", "write_file: ", "edit_file: "], 1):
        person.question(number)
        assert person.written().endswith(QUESTION + which)
        person.types("a\r" if number == 1 else "Always\r")
    for number in range(4, 4 + len(others)):
        person.question(number)
        person.types("n\r")
    person.comes("the end")
    person.leave()
    assert person.written().count(QUESTION) == 3 + len(others)
    assert files(tmp_path) == ["a", "b"] and (tmp_path / "b").read_text() == "3"
    first, _, second, *_ = given = answers(api, 3)
    assert first == second and "exit status" in first
    assert given[5:] == ["Not run: the user said no. "] * len(others)


def test_what_cannot_be_done_is_refused_before_it_is_asked_for(serve, tmp_path):
    (tmp_path / "f").write_text("one\none\n")
    calls = [
        edit("f", "one\n", "one\n"),
        edit("f", "two", "2"),
        edit("f", "one", "1"),
        edit("nowhere", "a", "b"),
        write("f", "unread"),
        write("../f", "x"),
        write(".transcripts/x", "x"),
        call("write_file", {"path": "g"}),
        call("no_such_tool", {}),
        call("read_file", {"path": "nowhere"}),
    ]
    asked = []

    def allow(wanted):
        asked.append(wanted)
        return agent.Verdict(True)

    api = serve([Reply(*calls), "the end"])
    make_agent(api, tmp_path, allow).run("go")
    assert asked == []
    assert all(result["is_error"] for result in results(api.requests[1].messages))
    assert files(tmp_path) == ["f"] and (tmp_path / "f").read_text() == "one\none\n"


# ================================ Without a person ================================


def with_permission(api: Any, cwd: Path, is_asking: bool) -> agent.Agent:
    """An agent that would ask, and has no terminal to ask on."""
    a = make_agent(api, cwd)
    a.allow = agent.Permission(a.screen, is_asking)
    return a


@pytest.mark.parametrize("is_asking", [True, False], ids=["asking", "-y"])
def test_where_nobody_can_be_asked_only_reading_is_allowed_without_yes(serve, tmp_path, is_asking):
    (tmp_path / "f").write_text("a text\n")
    api = serve([Reply(call("read_file", {"path": "f"}), bash("touch g"), write("h", "x")), "ok"])
    a = with_permission(api, tmp_path, is_asking)
    assert a.run("go") == "ok"
    reading, *others = answers(api, 1)
    assert reading == "a text"
    if is_asking:
        assert (
            others == ["Not run: the user cannot be asked (no terminal), and -y was not given"] * 2
        )
        assert "-y runs all unasked" in said(a) and files(tmp_path) == ["f"]
    else:
        assert files(tmp_path) == ["f", "g", "h"]


def test_yes_turns_asking_off_and_on_again(serve, tmp_path):
    api = serve([Reply(bash("touch a")), "one", Reply(bash("touch b")), "two"])
    a = with_permission(api, tmp_path, is_asking=True)
    assert agent.toggle_asking(a, "") is a
    assert "[no longer asking" in said(a)
    a.run("go")
    agent.toggle_asking(a, "")
    assert "[asking before" in said(a)
    a.run("go")
    assert files(tmp_path) == ["a"]
