"""What a person does at a terminal: interrupts, pastes, edits, pipes, odd locales (kind 6)."""

import os
import random
import re
import shlex
import subprocess
import sys
import termios
import time
from pathlib import Path

import pexpect
import pyte
import pytest
from harness import NO_WAITS, ask, command, environment, processes, results, run, said, session, texts
from messages_api import MessagesAPI, Reply, call

PROMPT = r"agent >>(?:\x1b\[[0-9;]*m)* "
PLAIN_PROMPT = "agent >> "
FIVE = ["first line", "", "exit code was 3", "\tindented", "last line"]


class Person:
    """The agent on a pseudo-terminal, at its first prompt, and an emulator that shows the screen."""

    def __init__(
        self,
        api: MessagesAPI,
        cwd: Path,
        *args: str,
        size: tuple[int, int] = (40, 100),
        program: list[str] | None = None,
        **env: str,
    ) -> None:
        self.api, self.raw = api, ""
        self.screen = pyte.Screen(size[1], size[0])
        self.stream = pyte.Stream(self.screen)
        variables = {**environment(api), "LC_ALL": "C.UTF-8", **env}
        first, *rest = program or [sys.executable, "-c", NO_WAITS, *args]
        self.child = pexpect.spawn(
            first,
            rest,
            cwd=str(cwd),
            encoding="utf-8",
            codec_errors="replace",
            timeout=40,
            env={name: value for name, value in variables.items() if value},
            dimensions=size,
        )
        self.child.logfile_read = self
        if not program:
            self.prompt()

    def write(self, text: str) -> None:
        """All that arrives, as pexpect reads it."""
        self.raw += text
        self.stream.feed(text)

    def flush(self) -> None:
        """pexpect wants one."""

    def prompt(self) -> None:
        self.child.expect(PROMPT)

    def ask(self, text: str, answer: str = "ok") -> None:
        """Type a prompt, see the answer and the next prompt."""
        self.child.sendline(text)
        self.child.expect_exact(answer)
        self.prompt()

    def shown(self) -> str:
        """The screen as one text: what was wrapped at its edge is whole again."""
        return "".join(self.screen.display)

    def until(self, reached, timeout: float = 30) -> None:
        """Read on until something holds."""
        end = time.monotonic() + timeout
        while not reached():
            assert time.monotonic() < end, "\n".join(line.rstrip() for line in self.screen.display)
            try:
                self.child.read_nonblocking(4096, timeout=0.1)
            except pexpect.TIMEOUT:
                pass

    def sees(self, text: str) -> None:
        self.until(lambda: text in self.shown())

    def leave(self, *keys: str) -> None:
        """Out by the door, whatever came before."""
        for key in keys or ("exit\r",):
            self.child.send(key)
        self.child.expect(pexpect.EOF)
        self.child.close()
        assert (self.child.exitstatus, self.child.signalstatus) == (0, None)
        assert "Traceback" not in self.raw


def typed(api: MessagesAPI) -> list[str]:
    """What the user said last, of each request."""
    return [texts(request.messages[-1:]) for request in api.requests]


def wait_for(reached, timeout: float = 30) -> None:
    end = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ctrl_c_while_the_model_answers_brings_the_prompt_back(serve, tmp_path):
    """Case 6-1. In the middle of a text, and while the server still says nothing."""
    stalled = [Reply(f"five words that are number{i}", end="stall") for i in range(3)]
    api = serve([*stalled, Reply("late", delay=30), "the end"])
    person = Person(api, tmp_path)
    for i in range(3):
        person.child.sendline(f"question {i}")
        person.child.expect_exact(f"number{i}")
        start = time.monotonic()
        person.child.sendintr()
        person.prompt()
        assert time.monotonic() - start < 4  # a second, and slack for a slow machine
        wait_for(lambda i=i: api.requests[i].closed_early)
    person.child.sendline("question 3")
    wait_for(lambda: len(api.requests) == 4)
    person.child.sendintr()
    person.prompt()
    wait_for(lambda: api.requests[3].closed_early)
    person.ask("question 4", "the end")
    person.leave()
    assert len(api.requests) == 5
    sent = texts(api.requests[-1].messages, "user")
    assert [sent.count(f"question {i}") for i in range(5)] == [1] * 5
    kept = texts(api.requests[-1].messages, "assistant")
    assert [kept.count(f"five words that are number{i}") for i in range(3)] == [1] * 3
    assert typed(api)[-1].endswith("question 4")


def test_a_quick_double_ctrl_c_is_no_traceback(serve, tmp_path):
    """Case 6-1. Twice at once while the model answers, and at the very first request, while the SDK loads."""

    def script(request):
        return (
            "the end" if "the last one" in texts(request.messages[-1:]) else Reply("some words", end="stall")
        )

    api = serve(script)
    person = Person(api, tmp_path)
    person.child.sendline("at once")
    person.child.expect_exact("at once")
    person.child.send("\x03\x03")
    for _ in range(3):
        person.child.sendline("begin")
        person.child.expect_exact("some words")
        person.child.send("\x03\x03")
        person.child.expect(PROMPT)
    person.ask("the last one", "the end")
    person.leave()


def test_ctrl_c_kills_a_command_that_ignores_it(serve, tmp_path):
    """Case 6-2."""
    first, second = (f"sleep {random.randrange(10**7, 10**8)}" for _ in range(2))
    script = f"trap '' INT; ({first} &) ; echo begun; touch begun; {second}; touch late"
    api = serve(
        [Reply(call("bash", {"command": script}), call("bash", {"command": "touch late"})), "the end"]
    )
    person = Person(api, tmp_path, "-y")
    person.child.sendline("run it")
    wait_for((tmp_path / "begun").exists)
    person.child.sendintr()
    person.prompt()
    wait_for(lambda: not processes(first) and not processes(second), 5)
    person.child.sendintr()
    person.prompt()
    person.ask("go on", "the end")
    person.leave()
    assert not (tmp_path / "late").exists()
    stopped, rest = results(api.requests[1].messages)
    assert "begun" in stopped["content"] and "interrupted by the user" in stopped["content"]
    assert "Not run" in rest["content"]
    assert typed(api)[-1].endswith("go on") and len(api.requests) == 2


@pytest.mark.parametrize("mode", ["iutf8", "-iutf8"])
def test_wide_characters_are_edited_whole(serve, tmp_path, mode):
    """Case 6-3. What is sent is what the screen showed."""
    api = serve()
    shell = ["/bin/sh", "-c", f'stty {mode}; exec "$@"', "sh", *command()]
    person = Person(api, tmp_path, program=shell)
    person.prompt()
    left, word, erase = "\x1b[D", "\x17", "\x7f"
    acts = [
        ("你好😀" + erase, "你好"),
        ("你好😀" + erase * 2 + "吧", "你吧"),
        ("你好 世界" + left + "x" + left * 2 + erase, "你好世x界"),
        ("看 文件 😀😀" + word + "好", "看 文件 好"),
        ("你" + erase + "é" + left * 2 + "ab", "abé"),
    ]
    for keys, text in acts:
        person.child.send(keys)
        person.sees(PLAIN_PROMPT + text + " " * 4)
        person.child.send("\r")
        person.child.expect_exact("ok")
        person.prompt()
    person.leave()
    assert typed(api) == [text for _, text in acts]


def test_broken_bytes_at_the_prompt_do_no_harm(serve, tmp_path):
    """Case 6-3. Half a character, and a byte that is none, each before Enter."""
    api = serve()
    person = Person(api, tmp_path)
    for broken in (b"\xe8\x83\n", b"\xff\n", b"a\xffb\n"):
        row = person.screen.cursor.y
        os.write(person.child.child_fd, broken)  # what is seen of it is up to the line editor
        person.until(
            lambda row=row: person.screen.cursor.y > row and person.shown().rstrip().endswith("agent >>")
        )
    person.ask("go on")
    person.leave()
    assert all(re.fullmatch("[ab\ufffd?\n]*|go on", text) for text in typed(api))
    assert typed(api)[-1] == "go on"


def test_a_paste_is_one_prompt(serve, tmp_path):
    """Case 6-4. With the markers that terminals put around a paste."""
    api = serve()
    person = Person(api, tmp_path)
    person.child.send("\x1b[200~" + "\n".join(FIVE) + "\x1b[201~")
    person.sees("last line")
    assert api.requests == []
    person.child.send("\r")
    person.child.expect_exact("ok")
    person.prompt()
    person.child.send("\x1b[200~look at this:\nexit\n\x1b[201~\r")
    person.child.expect_exact("ok")
    person.prompt()
    person.leave()
    assert [text.rstrip("\n") for text in typed(api)] == ["\n".join(FIVE), "look at this:\nexit"]


def test_a_paste_without_markers_is_one_prompt(serve, tmp_path):
    """Case 6-4. From a terminal that sends no markers; `exit` on a line of its own ends nothing halfway."""
    api = serve()
    person = Person(api, tmp_path, TERM="dumb")
    lines = [*FIVE[:3], "exit", *FIVE[3:]]
    person.child.send("\r".join(lines) + "\r")
    wait_for(lambda: len(api.requests) > 0)
    person.until(lambda: person.shown().rstrip().endswith("agent >>"))
    assert person.child.isalive()
    person.leave()
    assert typed(api) == ["\n".join(lines)]


def test_no_input_is_no_request(serve, tmp_path):
    """Case 6-6 a, e. An empty, a blank and a closed standard input."""
    api = serve()
    closed = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command()],
        cwd=tmp_path,
        timeout=60,
        check=False,
        env=environment(api),
        capture_output=True,
        text=True,
    )
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, "", "")
    empty = run(api, tmp_path)
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", "")
    blank = run(api, tmp_path, stdin="\n   \n\t\n")
    assert (blank.returncode, blank.stdout, blank.stderr) == (0, "", "")
    assert api.requests == []


def test_each_line_of_a_pipe_is_a_prompt(serve, tmp_path):
    """Case 6-6 b, c. The last line needs no line end; the prompt itself is not printed."""
    api = serve(lambda request: f"<answer to {texts(request.messages[-1:])}>")
    one = run(api, tmp_path, stdin="hello")
    assert one.returncode == 0 and one.stdout.count("<answer to hello>") == 1 and "agent >>" not in one.stdout
    assert typed(api) == ["hello"]
    three = run(api, tmp_path, stdin="one\n\ntwo\nthree\n")
    assert three.returncode == 0 and "Traceback" not in three.stderr
    assert re.findall("<answer to ([a-z]+)>", three.stdout) == ["one", "two", "three"]
    assert typed(api) == ["hello", "one", "two", "three"]


def test_ctrl_d_leaves_only_on_an_empty_line(serve, tmp_path):
    """Case 6-6 d. What comes after the program begins on a line of its own."""
    api = serve()
    person = Person(api, tmp_path)
    person.child.send("abc\x04")
    person.ask("def")
    person.leave("\x04")
    assert typed(api) == ["abcdef"]
    assert re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", person.raw).endswith("\n")


def test_a_locale_that_cannot_encode_gets_replacements(serve, tmp_path):
    """Case 6-7. The screen gets what it can; the model, commands and files get the true characters."""
    words = "schön → 你好 😀"
    (tmp_path / "words.txt").write_text(words, "utf-8")
    api = serve(
        [
            Reply(
                words,
                call("bash", {"command": "cat words.txt; echo ', ' " + words}),
                call("read_file", {"path": "words.txt"}),
                call("write_file", {"path": "你好.txt", "content": words}),
            ),
            words + " the end",
        ]
    )
    env = environment(api, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            command("-y"),
            cwd=tmp_path,
            env=env,
            input=b"begin\n",
            stdout=out,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    shown = (tmp_path / "out").read_bytes()
    assert done.returncode == 0 and done.stderr == b""
    assert shown.isascii() and shown.count(b"sch?n ? ?? ?") >= 4 and b"the end" in shown
    assert words in texts(api.requests[1].messages, "assistant")
    bash, read, write = results(api.requests[1].messages)
    assert read["content"] == words
    assert bash["content"].splitlines()[0] == f"{words},  {words}"
    assert not write.get("is_error") and (tmp_path / "你好.txt").read_text("utf-8") == words


def test_a_long_line_is_edited_without_overlap(serve, tmp_path):
    """Case 6-8. The screen shows prompt and text, and what is sent is what was typed."""
    api = serve()
    person = Person(api, tmp_path, size=(30, 40))
    start, home, end, up, down = PLAIN_PROMPT, "\x01", "\x05", "\x1b[A", "\x1b[B"
    person.ask("an earlier prompt")
    text = "".join(f"{i:03d}-" for i in range(25))
    person.child.send(text)
    person.sees(start + text + "  ")
    person.child.send(home + "X")
    person.sees(start + "X" + text + "  ")
    person.child.send(end + "Y")
    person.sees(start + "X" + text + "Y  ")
    person.child.send(up)
    person.until(lambda: person.shown().rstrip().endswith(start + "an earlier prompt"))
    person.child.send(down)
    person.until(lambda: person.shown().rstrip().endswith(start + "X" + text + "Y"))
    rows = [line.rstrip() for line in person.screen.display if line.strip()]
    assert rows[-3:] == [(start + "X" + text + "Y")[i : i + 40] for i in (0, 40, 80)]
    assert (person.screen.cursor.x, person.screen.cursor.y) == ((len(start + text) + 2) % 40, len(rows) - 1)
    person.child.send("\r")
    person.child.expect_exact("ok")
    person.prompt()
    person.child.setwinsize(30, 30)
    person.screen.resize(30, 30)
    person.child.send(up + home + "Z" + end + "\x0c")  # Ctrl-L: a fresh screen
    person.until(lambda: person.shown().startswith(start + "ZX" + text + "Y  "))
    person.child.send("\r")
    person.child.expect_exact("ok")
    person.prompt()
    person.leave()
    assert typed(api) == ["an earlier prompt", "X" + text + "Y", "ZX" + text + "Y"]


COLOURLESS = [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}]


@pytest.mark.parametrize("env", COLOURLESS, ids=["NO_COLOR", "dumb", "no TERM"])
def test_no_colour_where_none_is_wanted(serve, tmp_path, env):
    """Case 6-9. With NO_COLOR the line editor may still say that it takes pastes as a whole."""
    (tmp_path / "f").write_text("old\n")
    api = serve(
        [
            Reply(
                "words",
                call("edit_file", {"path": "f", "old_text": "old", "new_text": "new"}),
                call("bash", {"command": "printf '\\033[31mred\\033[0m'; sleep 1"}),
            ),
            "the end",
        ]
    )
    person = Person(api, tmp_path, **env)
    person.child.sendline("begin")
    for _ in range(2):
        person.child.expect_exact("[a]lways")
        person.child.sendline("y")
    person.child.expect_exact("the end")
    person.prompt()
    person.leave()
    allowed = r"\x1b\[\?2004[hl]" if "NO_COLOR" in env else "nothing"
    assert "\x1b" not in re.sub(allowed, "", person.raw)
    assert "+new" in person.raw and "red" in person.raw


def test_no_colour_in_a_file(serve, tmp_path):
    """Case 6-9. Colour on a terminal is not colour in a file, not even on the other stream of `-p`."""
    api = serve(
        lambda request: (
            "the end"
            if results(request.messages)
            else Reply("words", call("bash", {"command": "printf '\\033[31mred\\033[0m'"}))
        )
    )
    for arguments in (["-y"], ["-y", "-p", "begin"]):
        done = run(
            api, tmp_path, *arguments, stdin="" if "-p" in arguments else "begin\n", TERM="xterm-256color"
        )
        assert done.returncode == 0 and "the end" in done.stdout
        assert "\x1b" not in done.stdout + done.stderr and "red" in done.stdout + done.stderr


def test_a_session_without_a_terminal_has_no_colour(serve, tmp_path):
    """Case 6-9. Not even where another program holds the screen."""
    s = session(serve([Reply(call("bash", {"command": "echo red"})), "the end"]), tmp_path)
    assert ask(s, "begin") == "the end"
    assert "\x1b" not in said(s) and "\r" not in said(s)


def test_ctrl_c_at_the_prompt_clears_the_line(serve, tmp_path):
    """Case 6-11. Nothing of the line is sent, later lines are; blank lines do nothing; each way out is one.
    Case 6-9, the other side: on this terminal there is colour."""
    api = serve()
    person = Person(api, tmp_path)
    person.child.send("abc")
    person.sees(PLAIN_PROMPT + "abc")
    person.child.sendintr()
    person.prompt()
    person.ask("def")
    for _ in range(2):
        person.child.sendintr()
        person.prompt()
    for blank in ("", "   "):
        person.child.sendline(blank)
        person.prompt()
    person.child.send("one\x03")
    person.prompt()
    person.leave(" exit \r")
    assert re.search(r"\x1b\[[1-9][0-9;]*m", person.raw)
    assert typed(api) == ["def"]
    Person(api, tmp_path).leave("q\r")
    Person(api, tmp_path).leave("/exit\r")
    assert len(api.requests) == 1


HALF = {"": "then"}  # what stood there, what is typed later


@pytest.mark.parametrize("before", HALF, ids=["empty line"])
def test_the_prompt_works_after_ctrl_z_and_fg(serve, tmp_path, before):
    """Case 6-11. In a shell with job control; line editing, too."""
    api = serve()
    person = Person(api, tmp_path, program=["/bin/bash", "--norc", "--noprofile", "-i"], PS1="shell$ ")
    person.child.expect_exact("shell$ ")
    person.child.sendline(shlex.join(command()))
    person.child.expect(PROMPT)
    person.child.send(before)
    person.sees(PLAIN_PROMPT + before)
    person.child.send("\x1a")
    person.child.expect_exact("shell$ ")
    person.child.sendline("fg")
    person.child.expect_exact("agent.main()")  # the shell says what it brings back
    if before:
        wait_for(lambda: not termios.tcgetattr(person.child.child_fd)[3] & termios.ICANON, 10)
    person.child.send(HALF[before] + "\r")
    person.child.expect_exact("ok")
    person.prompt()
    person.child.sendline("exit")
    person.child.expect_exact("shell$ ")
    person.leave()
    assert typed(api) == ["then"]
