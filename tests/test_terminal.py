"""The terminal: keys, pastes, Ctrl-C, commands, pipes, and what stands on the screen."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time

import pexpect
import pytest
from harness import (
    PROMPT,
    agent,
    allow_all,
    command,
    environment,
    make_agent,
    processes,
    results,
    run,
    said,
    terminal,
    texts,
)
from messages_api import Fault, Reply, call, is_summary, thinking
from person import Person, wait_for

STATUS = re.compile(r"(\[[#.]{10}\] )?\S+( of \S+)? tokens; in \S+ \(\d+ % cached\), out \S+.*")
ROW = re.compile(r"([ \d,]{7}\d) (#* *) (system   |user     |assistant) (\S.*)")
FIRST_LINE = "[claude-sonnet-5-5 at {}. /help lists commands]"
UP, LEFT, HOME, END, ERASE, WORD = "\x1b[A", "\x1b[D", "\x01", "\x05", "\x7f", "\x17"


def bash(line):
    return call("bash", {"command": line})


def typed(api):
    """What the user said last, of each request."""
    return [texts(request.messages[-1:]) for request in api.requests]


def answer_all(request):
    return f"<{texts(request.messages[-1:])}>"


def wrapped(width, *lines):
    """The rows that these lines fill in a window of that width."""
    return [
        line[i : i + width].rstrip() for line in lines for i in range(0, max(len(line), 1), width)
    ]


def life(word):
    """The line that is seen while nothing else moves, with its seconds."""
    return rf"{word} \(\d+ s\)"


# ================================ A conversation on the screen ================================


CHECK = "echo a command that is longer than a row of this window && echo it works"
EDIT = {"path": "stats.py", "old_text": "middle = 1", "new_text": "middle = 2"}
ASKING = "  run it? [y]es / [n]o, with a reason / [a]lways "
READ = ["> read_file: stats.py", "  ordered = [1, 2, 3]", "  middle = 1"]
OUTPUT = ["  a command that is longer than a row of this window", "  it works", "  [exit status 0]"]
REFUSAL = ["  Not run: the user said no. leave it", "As you like: the file stays as it is."]
DIFF = ["> edit_file: stats.py", "   ordered = [1, 2, 3]", "  -middle = 1", "  +middle = 2"]


def test_the_first_acts_of_a_newcomer_row_by_row(serve, tmp_path):
    (tmp_path / "stats.py").write_text("ordered = [1, 2, 3]\nmiddle = 1\n")
    api = serve(
        [
            Reply("Let me see.", call("read_file", {"path": "stats.py"}), bash(CHECK)),
            Reply(call("edit_file", EDIT)),
            "As you like: the file stays as it is.",
            Reply("Once upon a time", end="stall"),
        ],
        models=[{"id": "a-model", "meta": {"n_ctx": 60000}}],
    )
    person = Person(api, tmp_path, size=(60, 60))
    rows = [f"[a-model at {api.url}, window 60,000 tokens. /help lists commands]"]

    def now(*more):
        rows.extend(more)
        seen = [row.removesuffix("^C") for row in person.rows()]
        assert seen == wrapped(60, *rows)

    now(PROMPT)
    person.types("fix the middle\r")
    person.question(1)
    rows[-1] += "fix the middle"
    now("Let me see.", *READ, f"> bash: {CHECK}", f"{ASKING}this:")
    person.types("y\r")
    person.question(2)
    rows[-1] += " y"
    now(*OUTPUT, *DIFF, f"{ASKING}edit_file:")
    person.types("n, leave it\r")
    person.prompt()
    rows[-1] += " n, leave it"
    now(*REFUSAL, person.status(), PROMPT)
    person.types("tell me a story\r")
    person.comes("upon a time")
    person.types("\x03")
    person.prompt()
    rows[-1] += "tell me a story"
    now("Once upon a time", "[interrupted]", person.status(), PROMPT)
    person.leave()


def test_waiting_reading_and_running_are_one_row_that_leaves_nothing(serve, tmp_path):
    """In a narrow window: a wait that is announced, a slow reply, lines wider than the window."""
    wide = "printf '\\u4f60%.0s' {1..60} && echo"
    until = "until [ -e seen$i ]; do sleep 0.02; done"
    long = f"for i in 1 2; do [ $i = 2 ] && {wide} || echo mark {{10..25}}; {until}; done"
    seen = threading.Event()

    def slow(request):
        seen.wait(60)
        return Reply(thinking("musing"), "I run it.", bash(long))

    api = serve([Fault(529, headers={"retry-after": "1.5"}), slow, "The end."])
    person = Person(api, tmp_path, "-y", size=(40, 40))
    retry = f"[529 from {api.url}: a scripted fault; trying again in 1.5 s]"
    before = [FIRST_LINE.format(api.url), PROMPT + "go", retry, "I run it.", "> bash: " + long]
    person.types("go\r")
    person.saw(life("waiting"))
    person.saw(life(r"reading the \.\.\."))
    seen.set()
    for number, line in enumerate(("mark 10 11 1", "\u4f60" * 12), 1):
        person.saw(life(re.escape(line + "...")))
        (tmp_path / f"seen{number}").touch()
    person.comes("The end.")
    person.prompt()
    mark = "  mark " + " ".join(map(str, range(10, 26)))
    wide_rows = ["  " + "\u4f60" * 19, "\u4f60" * 20, "\u4f60" * 20, "\u4f60"]
    rows = [row.replace("\u4f60 ", "\u4f60") for row in person.rows()]
    rest = wrapped(40, "  [exit status 0]", "The end.", person.status(), PROMPT)
    assert rows == wrapped(40, *before, mark) + wide_rows + rest
    assert "musing" not in person.raw
    person.leave()


@pytest.mark.slow
def test_a_sign_of_life_is_seen_while_a_long_call_is_written_after_a_text(serve, tmp_path):
    """Nothing of a call is shown before it is complete; but that one is coming is seen."""
    write = call("write_file", {"path": "f", "content": "x" * 80})
    api = serve([Reply("I write it.", write, pace=0.25, thinks=False), "The end."])
    person = Person(api, tmp_path, "-y")
    person.ask("go", "The end.")
    person.leave()
    between = person.written().partition("I write it.")[2].partition("> write_file")[0]
    assert re.search(life("writing"), between)


@pytest.mark.slow
def test_nothing_is_coloured_where_none_is_wanted(serve, tmp_path, monkeypatch):
    (tmp_path / "f").write_text("old\n")
    edit = call("edit_file", {"path": "f", "old_text": "old", "new_text": "new"})
    red = bash("printf '\\033[31mred\\033[0m'; sleep 0.6")
    for env in ({"NO_COLOR": "1"}, {"TERM": ""}):
        (tmp_path / "f").write_text("old\n")
        person = Person(serve([Reply("words", edit, red), "the end"]), tmp_path, **env)
        person.types("begin\r")
        for count in (1, 2):
            person.question(count)
            person.types("y\r")
        person.comes("the end")
        person.prompt()
        person.leave()
        own = r"\x1b\[\?2004[hl]" if "NO_COLOR" in env else "nothing"  # the line editor's
        assert "\x1b" not in re.sub(own, "", person.raw), env
        assert "+new" in person.raw and "red" in person.raw


# ================================ Keys ================================


@pytest.mark.parametrize("mode", ["iutf8", "-iutf8"])
def test_what_is_sent_is_what_the_screen_showed(serve, tmp_path, mode):
    """Wide characters are edited whole, and broken bytes do no harm."""
    api = serve()
    person = Person(api, tmp_path)
    subprocess.run(["stty", mode], stdin=person.child.child_fd, check=True)
    acts = [
        ("日本😀" + ERASE, "日本"),
        ("日本😀" + ERASE * 2 + "語", "日語"),
        ("看 文件 😀😀" + WORD + "好" + LEFT * 2 + "x", "看 文件x 好"),
        ("日" + ERASE + "é" + LEFT * 2 + "ab", "abé"),
    ]
    for keys, shown in acts:
        person.types(keys)
        person.until(
            lambda shown=shown: (
                person.rows()[-1]
                .replace(" ", "")
                .endswith(PROMPT.replace(" ", "") + shown.replace(" ", ""))
            )
        )
        person.types("\r")
        person.comes("ok")
        person.prompt()
    for broken in (b"\xe8\x83\n", b"a\xffb\n"):  # whether it is sent is up to the line editor
        row = person.screen.cursor.y
        os.write(person.child.child_fd, broken)
        person.until(lambda row=row: person.screen.cursor.y > row)
        person.prompt()
    person.ask("go on")
    person.leave()
    sent = typed(api)
    assert sent[:4] == [shown for _, shown in acts] and sent[-1] == "go on"
    assert all(re.fullmatch("[ab\ufffd?\n]*", text) for text in sent[4:-1])


def test_a_long_line_is_edited_without_overlap_in_a_window_that_changes(serve, tmp_path):
    api = serve()
    person = Person(api, tmp_path, size=(30, 40))
    person.ask("an earlier prompt")
    text = "".join(f"{i:03d}-" for i in range(25))
    person.types(text)
    person.sees(PROMPT + text + "  ")
    person.types(HOME + "X" + END + "Y")
    text = "X" + text + "Y"
    person.sees(PROMPT + text + "  ")
    person.types(UP)
    person.until(lambda: person.shown().rstrip().endswith(PROMPT + "an earlier prompt"))
    person.types("\x1b[B")  # down again
    person.until(lambda: person.rows()[-3:] == wrapped(40, PROMPT + text))
    assert person.screen.cursor.x == len(PROMPT + text) % 40
    for width in (30, 100, 40):
        person.resize(30, width)
        text = "A" + text + "z"
        person.types(HOME + "A" + END + "z\x0c")  # Ctrl-L: a fresh screen
        person.until(lambda width=width, text=text: person.rows() == wrapped(width, PROMPT + text))
        column = len(PROMPT + text) % width
        person.until(lambda column=column: person.screen.cursor.x == column)
    person.ask("")
    person.leave()
    assert typed(api) == ["an earlier prompt", text]


LINES = ["the first line", "", "exit code was 3", "\tindented", "exit", "the last line"]


def test_a_paste_is_one_prompt_and_a_command_in_its_first_line_is_a_command(serve, tmp_path):
    api = serve()
    person = Person(api, tmp_path)

    def paste(text):
        person.types(f"\x1b[200~{text}\x1b[201~")

    paste("\n".join(LINES))
    person.sees("the last line")
    assert api.requests == []
    person.ask("")
    paste("look at this:\nexit\n")
    person.ask("")
    paste("/clear\nfix the bug")
    person.comes("fix the bug")
    person.types("\r")
    person.comes("a new conversation")
    person.comes("ok")
    person.prompt()
    person.leave()
    assert [text.rstrip("\n") for text in typed(api)] == [
        "\n".join(LINES),
        "look at this:\nexit",
        "fix the bug",
    ]
    assert len(api.requests[2].messages) == 1


def test_on_a_dumb_terminal_a_paste_is_one_prompt_and_nothing_is_an_escape_code(serve, tmp_path):
    api = serve()
    person = Person(api, tmp_path, TERM="dumb")
    person.types("\r".join(LINES) + "\r")
    person.comes("\r\nok\r\n")
    person.prompt()
    person.types("/clear\rfix the bug\r")
    person.comes("a new conversation")
    person.comes("\r\nok\r\n")
    person.prompt()
    person.leave()
    assert typed(api) == ["\n".join(LINES), "fix the bug"]
    assert len(api.requests[1].messages) == 1
    assert "\x1b" not in person.raw


def test_what_is_typed_before_a_question_is_at_the_next_prompt(serve, tmp_path):
    """A line that has ended and one that has not; neither is an answer, nor is it lost."""
    is_typed = threading.Event()

    def slow(request):
        is_typed.wait(60)
        return Reply(bash("touch no"))

    api = serve([slow, "one", "two", slow, "three"])
    person = Person(api, tmp_path)
    for count, (ahead, answer) in enumerate((("y\r", "one"), ("yes, and", "three")), 1):
        asked = len(api.requests)
        person.types("go\r")
        wait_for(lambda asked=asked: len(api.requests) > asked)
        person.types(ahead)
        is_typed.set()
        person.question(count)
        is_typed.clear()
        person.types("n\r")
        person.comes(answer)
        person.until(lambda text=ahead: person.rows()[-1] == PROMPT + text.strip())
        if answer == "one":
            person.ask("es", "two")
    person.leave(" more\x15exit\r")
    assert typed(api)[2] == "yes" and not (tmp_path / "no").exists()


def test_ctrl_c_and_ctrl_d_at_the_prompt(serve, tmp_path):
    """Ctrl-C clears the line, Ctrl-D leaves on an empty one only; blank lines do nothing."""
    api = serve()
    person = Person(api, tmp_path)
    person.types("abc")
    person.sees(PROMPT + "abc")
    for keys in ("\x03", "\x03", "\x03", "\r", "   \r"):
        rows = len(person.rows())
        person.types(keys)
        person.until(lambda rows=rows: len(person.rows()) > rows)
        person.prompt()
    person.types("de\x04")
    person.ask("f")
    person.leave("\x04")
    assert typed(api) == ["def"]
    assert person.written().endswith("\n")  # what comes next begins on a line of its own
    for keys in (" exit \r", "q\r", "/exit\r"):
        Person(api, tmp_path).leave(keys)
    assert len(api.requests) == 1


def test_the_arrow_brings_prompts_of_this_folder_and_nothing_that_drives_a_terminal(
    serve, tmp_path
):
    api = serve([Reply(bash("true")), "one"])
    person = Person(api, tmp_path)
    person.types("first\r")
    person.question()
    person.types("y\r")
    person.comes("one")
    person.prompt()
    person.ask("zweite \u00fc \U0001f600")
    person.leave()
    history = tmp_path / ".transcripts/history"
    assert history.stat().st_mode & 0o777 == 0o600
    evil = "e\x9b2Jv\u202ei\x1b]0;t\x07l"
    history.write_text(history.read_text() + evil + "\n")

    person = Person(serve(["two"]), tmp_path)
    shown = agent.visible(evil)
    for prompt in (shown, "zweite \u00fc \U0001f600", "first"):
        person.types(UP)
        person.until(
            lambda prompt=prompt: prompt in person.rows()[-1].replace("\U0001f600 ", "\U0001f600")
        )
    person.ask("", "two")
    person.leave()
    assert "\x9b" not in person.raw and "\u202e" not in person.raw and "\x1b]" not in person.raw


def test_a_history_behind_a_link_is_neither_read_nor_written(serve, tmp_path):
    (tmp_path / "mine").write_text("a secret\n")
    (tmp_path / ".transcripts").mkdir()
    (tmp_path / ".transcripts/history").symlink_to("../mine")
    person = Person(serve(), tmp_path)
    person.types(UP + "x")
    person.until(lambda: person.rows()[-1] == PROMPT + "x")
    person.ask("")
    person.leave()
    assert (tmp_path / "mine").read_text() == "a secret\n" and "secret" not in person.raw


def test_prompts_of_another_locale_do_not_keep_the_program_from_starting(serve, tmp_path):
    (tmp_path / ".transcripts").mkdir()
    (tmp_path / ".transcripts/history").write_text("gr\u00fc\u00dfe \u4f60\n/help\n", "utf-8")
    child = terminal(serve(), tmp_path, LC_ALL="C", PYTHONUTF8="")
    child.send(UP + "\r")
    child.expect_exact("/compact [focus]")
    child.expect_exact(PROMPT)
    child.sendline("exit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


# ================================ Ctrl-C and other signals ================================


@pytest.mark.parametrize("keys", ["\x03", "\x03\x03"], ids=["once", "twice"])
def test_ctrl_c_while_the_model_is_asked_brings_the_prompt_back(serve, tmp_path, keys):
    """While the server says nothing, and in a reply; what was paid counts."""
    cache = ("cache_read_input_tokens", "cache_creation_input_tokens")
    usage = {"input_tokens": 4321, **dict.fromkeys(cache, 0)}
    replies = [Reply("late", delay=60), Reply("five words", usage=usage, end="stall"), "the end"]
    api = serve(replies)
    person = Person(api, tmp_path)
    person.types("silent\r")
    wait_for(lambda: len(api.requests) == 1)
    person.types(keys)
    person.until(lambda: "[interrupted]" in person.raw)
    person.prompt()
    wait_for(lambda: api.requests[0].closed_early)
    person.types("reply\r")
    person.until(lambda: "five words" in person.raw)
    person.types(keys)
    person.until(lambda: person.raw.count("[interrupted]") == 2)
    person.prompt()
    wait_for(lambda: api.requests[1].closed_early)
    assert "; in 4.3k (" in person.status()
    person.ask("go on", "the end")
    person.leave()
    told = api.requests[2].messages
    assert [texts(told, "user").count(word) for word in ("silent", "reply", "go on")] == [1, 1, 1]
    assert texts(told, "assistant").count("five words") == 1 and len(api.requests) == 3


def test_ctrl_c_twice_kills_a_command_that_ignores_it(serve, tmp_path):
    mark = f"sleep 1{os.getpid()}"
    stubborn = f"trap '' INT; ({mark} &); touch begun; {mark}; touch late"
    api = serve([Reply(bash(stubborn), bash("touch late")), "the end"])
    person = Person(api, tmp_path, "-y")
    person.types("command\r")
    wait_for((tmp_path / "begun").exists)
    person.types("\x03\x03")
    wait_for(lambda: not processes(mark))
    person.prompt()
    person.ask("go on", "the end")
    person.leave()
    assert not (tmp_path / "late").exists()
    stopped, rest = results(api.requests[1].messages)
    assert "interrupted by the user" in stopped["content"] and "Not run" in rest["content"]


def test_ctrl_c_in_compact_brings_the_prompt_back_and_leaves_no_line_behind(serve, tmp_path):
    api = serve(["ok", Reply("late", delay=60), "the end"])
    person = Person(api, tmp_path)
    person.ask("go " + "on and " * 400)
    person.types("/compact\r")
    person.saw(life("summarising"))
    person.types("\x03")
    person.prompt()
    wait_for(lambda: api.requests[1].closed_early)
    person.types("next")
    person.until(lambda: person.rows()[-1] == PROMPT + "next")
    assert "summarising" not in person.shown()
    person.ask("", "the end")
    person.leave()
    assert texts(api.requests[2].messages).count("on and ") == 400


def test_the_terminal_is_set_as_before_after_each_command_and_at_the_end(serve, tmp_path):
    """A command can reach the user's terminal by its name, as password programs do."""
    tty = "$(tty </proc/$PPID/fd/0)"
    deeds = [
        f"stty -echo <{tty}",
        f"stty raw <{tty}",
        r"printf '\033[?25l\033[8m\033(0'",
        "sleep 99",
    ]
    api = serve(
        [item for deed in deeds[:3] for item in (Reply(bash(deed)), "done")]
        + [Reply(bash(deeds[3]))]
    )
    person = Person(api, tmp_path, "-y")
    prompting = person.modes()
    for _ in deeds[:3]:
        person.ask("go", "done")
        person.until(lambda: person.modes() == prompting)
    assert not person.screen.cursor.hidden
    person.types("go\r")
    person.saw(life("running"))
    person.types("\x03")
    person.prompt()
    person.until(lambda: person.modes() == prompting)
    person.types("exit\r")
    wait_for(lambda: person.modes()[3] & termios.ECHO and person.modes()[3] & termios.ICANON)
    person.gone()


def test_a_command_that_turns_the_echo_off_does_not_make_the_next_answer_blind(serve, tmp_path):
    tty = "$(tty </proc/$PPID/fd/0)"
    api = serve([Reply(bash(f"stty -echo <{tty}"), bash("echo two")), "done"])
    person = Person(api, tmp_path)
    person.types("go\r")
    person.question(1)
    person.types("y\r")
    person.question(2)
    person.types("yes\r")
    person.sees("this: yes")  # it is seen as it is typed
    person.comes("done")
    person.leave()


@pytest.mark.slow
def test_ctrl_z_and_fg_work_at_the_prompt_at_a_question_and_in_a_command(serve, tmp_path):
    """In a shell with job control, and in the C locale, in which words are typed all the same."""
    api = serve(
        [
            Reply(bash("touch begun; until [ -e go ]; do sleep 0.02; done; echo gr\u00fcn")),
            "Sch\u00f6n \u2192 the end",
        ]
    )
    shell = ["/bin/bash", "--norc", "--noprofile", "-i"]
    locale = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "", "PYTHONIOENCODING": ""}
    person = Person(api, tmp_path, program=shell, at="shell$ ", PS1="shell$ ", **locale)

    def stop_and_go_on():
        person.types("\x1a")
        person.comes("shell$ ")
        person.types("fg\r")
        person.comes("agent.main()")  # the shell says what it brings back

    person.types(shlex.join(command()) + "\r")
    person.prompt()
    stop_and_go_on()
    person.types("gr\u00fc\u00dfe\r")
    person.question()
    stop_and_go_on()
    person.types("y\r")
    wait_for((tmp_path / "begun").exists)
    stop_and_go_on()
    (tmp_path / "go").touch()
    person.comes("the end")
    person.prompt()
    person.types("exit\r")
    person.comes("shell$ ")
    person.leave()
    assert typed(api)[0] == "gr\u00fc\u00dfe"
    assert "gr\u00fcn" in results(api.requests[1].messages)[0]["content"]


def test_neither_typing_nor_ctrl_c_nor_leaving_waits_for_the_sdk(serve, tmp_path):
    package = tmp_path / "sdk/anthropic"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"import time\nopen({str(tmp_path / 'begun')!r}, 'w').close()\ntime.sleep(100)\n"
    )
    env = {"PYTHONPATH": str(tmp_path / "sdk")}
    person = Person(serve(), tmp_path, program=command(), **env)
    person.types("fox\x7f\x7fit \x1b[D\x1b[Dx")
    person.until(lambda: person.rows()[-1] == PROMPT + "fixt")
    wait_for((tmp_path / "begun").exists)
    person.types("\r")
    person.saw(life("reading the prompt"))
    person.types("\x03")
    person.prompt()
    person.leave("\x04")


# ================================ Commands of the prompt ================================


@pytest.fixture
def pipe(monkeypatch):
    """pipe(agent, text): a conversation that is piped in."""

    def run_all(a, text):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        agent.repl(a)

    return run_all


def test_each_line_of_a_pipe_is_a_prompt_and_stdout_is_what_the_model_says(serve, tmp_path, pipe):
    script = [Reply("I look.", bash("echo of the command")), "one", Fault(400), "three"]
    api = serve(script)
    out, notes = io.StringIO(), io.StringIO()
    settings = make_agent(api, tmp_path).settings
    a = agent.Agent(settings, tmp_path, allow_all, agent.Screen(out, notes))
    pipe(a, "first\n\n  \nsecond\n/context\n/help\n/nonsense\nthird\n/clear\n exit \nnever\n")
    assert out.getvalue() == "I look.\none\nthree\n"
    assert typed(api)[0] == "first" and [text.split()[-1] for text in typed(api)[2:]] == [
        "second",
        "third",
    ]
    for words in (
        "> bash: echo of",
        "a scripted fault",
        "there is no /nonsense",
        "/compact [focus]",
    ):
        assert words in notes.getvalue()
    assert "agent >>" not in out.getvalue() + notes.getvalue()
    assert "\x1b" not in notes.getvalue() and "\r" not in notes.getvalue()
    pipe(a, "no line end")
    assert typed(api)[-1] == "no line end"


def test_an_unknown_word_with_a_slash_is_a_prompt_if_text_follows(serve, tmp_path, pipe):
    api = serve(answer_all)
    a = make_agent(api, tmp_path)
    pipe(
        a, "/home is full, what now?\n/* a comment */ int x;\n/usr/bin/env\n/exitt\n/\n  /Help  \n"
    )
    assert typed(api) == ["/home is full, what now?", "/* a comment */ int x;", "/usr/bin/env"]
    for word in ("/exitt", "/", "/Help"):
        assert f"[there is no {word}; /help lists what is]" in said(a)


def test_the_commands_never_reach_the_model(serve, tmp_path, pipe):
    api = serve(lambda request: "A summary." if is_summary(request) else "ok")
    a = make_agent(api, tmp_path)
    pipe(a, "/help\n/compact\n/context\n" + "the word fish. " * 300 + "\n/compact the word fish\n")
    assert [is_summary(request) for request in api.requests] == [False, True]
    assert "the word fish" in typed(api)[1].splitlines()[-1]
    shown = (*set(agent.COMMANDS) - {"/help"}, "/exit", "Ctrl-D", "Ctrl-C")
    assert [word for word in shown if word not in said(a)] == []
    pipe(a, "go on\n/clear\nhello\n")
    assert "A summary." in texts(api.requests[2].messages)
    assert texts(api.requests[3].messages) == "hello" and len(api.requests) == 4
    assert f"[a new conversation; the old one is in {a.transcript.name}]" in said(a)


def test_what_compact_cost_is_in_a_status_line_and_nothing_is_infinite(serve, tmp_path, pipe):
    usage = {"input_tokens": 7000, "cache_read_input_tokens": 3000}
    usage |= {"cache_creation_input_tokens": 0, "output_tokens": 55}
    script = ["ok", Reply("A summary.", usage=usage)]
    a = make_agent(serve(script), tmp_path, threshold=0)
    pipe(a, "the word fish. " * 900 + "\n")
    start = len(said(a))
    pipe(a, "/compact\n")
    last = said(a)[start:].splitlines()[-1]
    assert "in 10k (30 % cached), out 55; forgot " in last and STATUS.fullmatch(last)
    pipe(a, "/context\n")
    assert "inf" not in said(a)


# ================================ The status line and /context ================================


def test_the_status_line_says_what_the_last_prompt_cost_and_how_much_it_forgot(serve, tmp_path):
    usage = {
        "input_tokens": 100,
        "cache_read_input_tokens": 890,
        "cache_creation_input_tokens": 10,
        "output_tokens": 7,
    }

    def script(request):
        done = len(results(request.messages))
        if "forget" in texts(request.messages) and done < 2:
            return Reply(bash(f"yes {done} | head -c 20000"))
        return Reply("ok", usage=usage)

    a = make_agent(serve(script), tmp_path, keep_recent=1, clear_at_least=0)
    lines = []
    for prompt in ("hello", "forget", "hello"):
        assert agent.turn(a, prompt) == 0
        lines.append(said(a).splitlines()[-1])
    assert all(STATUS.fullmatch(line) and line.startswith("[") for line in lines)
    assert lines[0].endswith("; in 1.0k (89 % cached), out 7")
    assert ["; forgot " in line for line in lines] == [False, True, False]
    assert 4.5 < float(lines[1].rpartition(" ")[2].removesuffix("k")) < 9


def test_the_status_line_fits_a_row_of_80_characters(serve, tmp_path):
    a = make_agent(serve(), tmp_path)
    for size in (0, 999, 1000, 9_949, 99_499, 999_499, 9_949_999, 99_000_000):
        a.budget.fixed = size
        a.budget.limit = max(size * 2, 1)
        a.forgot = size
        a.model.spent.update(input=size, cached=size, output=size)
        line = agent.status_line(a)
        assert len(line) < 80 and STATUS.fullmatch(line)
    numbers = {0: "0", 999: "999", 1000: "1.0k", 8_240: "8.2k", 41_300: "41k", 1_234_567: "1.2M"}
    assert {size: agent.short(size) for size in numbers} == numbers
    a.budget.limit = 100_000
    for size, bar in ((0, ".........."), (49_000, "#####....."), (260_000, "##########")):
        a.budget.fixed = size
        assert agent.status_line(a).startswith(f"[{bar}] ")


def context(a):
    """What /context shows: rows whose sizes add up, as (size, role, text)."""
    start = len(said(a))
    agent.show_context(a, "")
    *lines, last = said(a)[start:].splitlines()
    assert last == agent.status_line(a)
    table = [ROW.fullmatch(line) for line in lines]
    assert all(table)
    sizes = [int(row[1].replace(",", "")) for row in table]
    assert abs(sum(sizes) - a.budget.count(a.messages)) <= 2 * len(sizes)
    for row, size in zip(table, sizes, strict=True):
        assert len(row[2]) == 16 and abs(len(row[2].strip()) - 16 * size / max(sizes)) <= 1
        assert len(row[0]) < 84 or ".transcripts/" in row[4]  # an address stays whole
    return [(size, row[3].strip(), row[4]) for size, row in zip(sizes, table, strict=True)]


def test_context_has_a_row_for_each_message_and_adds_up(serve, tmp_path):
    def script(request):
        done = len(results(request.messages))
        if is_summary(request):
            return "A summary."
        if done < 3:
            return Reply(thinking("musing"), "I count.", bash(f"seq {done}000 {done}900"))
        return "\x1b[2J" + "All is well. " * 30

    a = make_agent(serve(script), tmp_path, keep_recent=1, clear_at_least=0)
    assert [row[1:] for row in context(a)] == [("system", "system prompt and tools")]
    a.run("count   to\na thousand")
    rows = context(a)
    assert [role for _, role, _ in rows] == ["system"] + ["user", "assistant"] * 4
    assert rows[1][2] == "text count to a thousand"
    assert rows[2][2].startswith("thinking | text I count. | bash seq 0")
    assert rows[8][2].startswith("thinking | text \\x1b[2JAll is well.")
    gone = [result["content"] for result in results(a.messages) if "[Previous" in result["content"]]
    assert len(gone) == 2 and [rows[3][2], rows[5][2]] == [f"tool_result {text}" for text in gone]
    a.budget.ratio = 1.37
    context(a)
    assert a.auto_compact("")
    assert a.transcript.folder in context(a)[1][2]
    assert "musing" not in said(a) and "\x1b" not in said(a)


# ================================ One task, pipes, files ================================


@pytest.fixture
def program(monkeypatch, capsys, tmp_path):
    """program(api, "-p", "..."): the command line, here. Returns status, stdout, stderr."""

    def run_main(api, *args, stdin=b"", has_stderr=True, **env):
        variables = environment(api, **env)
        for name in set(os.environ) - set(variables):
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["agent.py", *args])
        if not has_stderr:
            monkeypatch.setattr(sys, "stderr", None)
        monkeypatch.setattr(agent, "WAITS", (0, 0, 0))
        file = tmp_path / ".stdin"
        file.write_bytes(stdin or b"")
        with open(file if stdin else os.devnull, encoding="utf-8") as opened:
            monkeypatch.setattr(sys, "stdin", None if stdin is None else opened)
            try:
                status = agent.main()
            except SystemExit as end:
                status = end.code
        return status, *capsys.readouterr()

    return run_main


def interrupt_then(reply):
    """A step of a script: Ctrl-C comes for this process while its request is answered."""

    def step(request):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return reply

    return step


def test_one_task_prints_the_answer_and_its_status_says_how_it_ended(serve, program):
    look = Reply("I look.", bash("echo hidden"))
    api = serve([look, "The \x1b[1manswer."])
    status, out, err = program(api, "-y", "-p", "a task")
    assert (status, out) == (0, "The \x1b[1manswer.\n")  # data, as it came
    assert "> bash: echo hidden" in err and STATUS.fullmatch(err.splitlines()[-1])
    assert typed(api)[0] == "a task"
    for item, expected in ((Fault(400), 1), (interrupt_then(Reply("late", delay=60)), 130)):
        status, out, err = program(serve([item]), "-p", "a task")
        assert (status, out) == (expected, "") and "Traceback" not in err
    assert "[interrupted]" in err
    status, out, err = program(serve(), "-p", "a task", AGENT_THRESHOLD="many")
    assert (status, out) == (2, "") and "AGENT_THRESHOLD" in err


def test_what_is_piped_into_a_task_is_data_and_a_dash_reads_the_task(serve, program, tmp_path):
    api = serve()
    assert program(api, "-p", "explain", stdin="a log line\nfix \u4f60\n".encode())[0] == 0
    data, prompt = [block["text"] for block in api.requests[0].messages[0]["content"]]
    assert prompt == "explain" and "a log line\nfix \u4f60" in data
    assert program(api, "-p", "-", stdin=b"two\nlines\n")[0] == 0
    assert typed(api)[1].strip() == "two\nlines"
    assert program(api, "-p", "explain", stdin=b" \n")[0] == 0
    assert typed(api)[2] == "explain"
    for args, stdin in ((["-p", " "], b"data"), (["-p", "-"], b"\n")):
        status, out, err = program(api, *args, stdin=stdin)
        assert (status, out, err) == (1, "", "The prompt is empty.\n")
    assert len(api.requests) == 3


def test_a_pipe_that_nobody_closes_is_waited_for_with_a_word(serve, tmp_path, monkeypatch):
    api = serve()
    for is_slow in (False, True):
        a = make_agent(api, tmp_path)
        read_end, write_end = os.pipe()

        def person(a=a, write_end=write_end, is_slow=is_slow):
            if is_slow:
                wait_for(lambda: "[waiting for the end of standard input" in said(a))
            os.write(write_end, b"late data")
            os.close(write_end)

        with open(read_end) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            thread = threading.Thread(target=person)
            thread.start()
            assert agent.run_one(a, "go") == 0
            thread.join()
        assert ("[waiting for" in said(a)) == is_slow
        assert "late data" in typed(api)[-1]


def test_no_input_is_no_request(serve, program, tmp_path):
    api = serve()
    assert program(api) == (0, "", "")
    assert program(api, stdin=None) == (0, "", "")  # it is closed
    assert program(api, stdin=b"\n   \n\t\n") == (0, "", "")
    assert api.requests == []


def test_closed_streams_are_no_traceback(serve, program, tmp_path):
    """The work is done all the same."""
    api = serve([Reply(bash("echo done > proof")), "the end"])
    shell = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command("-y", "-p", "go")]
    ended = subprocess.run(shell, cwd=tmp_path, env=environment(api), timeout=120, check=False)
    assert ended.returncode == 0 and (tmp_path / "proof").read_text() == "done\n"
    api = serve([Reply(bash("echo again > proof")), "the end"])
    assert program(api, "-y", "-p", "go", has_stderr=False) == (0, "the end\n", "")
    assert (tmp_path / "proof").read_text() == "again\n"


def test_a_locale_that_cannot_encode_gets_replacements(serve, tmp_path):
    """The screen gets what it can; the model, commands and files get the true characters."""
    words = "sch\u00f6n \u2192 \u4f60\u597d \U0001f600"
    (tmp_path / "words.txt").write_text(words, "utf-8")
    calls = [
        bash("cat words.txt; echo ', ' " + words),
        call("read_file", {"path": "words.txt"}),
        call("write_file", {"path": "\u4f60\u597d.txt", "content": words}),
    ]
    api = serve([Reply(words, *calls), words + " the end"])
    locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run(api, tmp_path, "-y", stdin="begin\n", **locale)
    assert done.returncode == 0 and done.stdout.isascii() and done.stderr.isascii()
    assert done.stdout.count("sch?n ? ?? ?") == 2 and "the end" in done.stdout
    assert done.stderr.count("sch?n ? ?? ?") >= 3 and "Traceback" not in done.stderr
    assert words in texts(api.requests[1].messages, "assistant")
    printed, read, written = results(api.requests[1].messages)
    assert read["content"] == words and not written.get("is_error")
    assert printed["content"].splitlines()[0] == f"{words},  {words}"
    assert (tmp_path / "\u4f60\u597d.txt").read_text("utf-8") == words


def test_a_task_from_stdin_may_hold_what_the_locale_does_not_know(serve, tmp_path):
    """Without the SDK, which takes seconds to load: what would be sent is in the record."""
    package = tmp_path / "sdk/anthropic"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it is left out')\n")
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env |= {"PYTHONPATH": str(tmp_path / "sdk")}
    done = run(serve(), tmp_path, "-p", "-", stdin="say gr\u00fc\u00dfe please", **env)
    assert done.returncode == 1 and "it is left out" in done.stderr
    [record] = (tmp_path / ".transcripts").glob("*.jsonl")
    assert re.search(r'"say gr[^"]+e please"', record.read_text("utf-8"))


# ================================ The start ================================


def test_bash_is_found_on_the_path_and_if_there_is_none_that_is_said(serve, program, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "bash").write_text('#!/bin/sh\necho by way of elsewhere\nexec /bin/bash "$@"\n')
    (folder / "bash").chmod(0o755)
    api = serve([Reply(bash("echo a")), "ok"])
    assert program(api, "-y", "-p", "go", PATH=str(folder))[0] == 0
    [result] = results(api.requests[1].messages)
    assert result["content"].startswith("by way of elsewhere\na\n")
    status, out, err = program(api, "-p", "go", PATH=str(tmp_path))
    assert (status, out) == (2, "") and "needs a Bash" in err and len(api.requests) == 2


def test_only_a_plain_file_of_the_project_gives_notes_and_the_rest_of_a_long_one_is_told(
    serve, tmp_path
):
    (tmp_path / "outside").write_text("PLANTED")
    work = tmp_path / "work"
    work.mkdir()
    notes = work / "AGENTS.md"

    def told(before=()):
        api = serve()
        a = make_agent(api, work)
        a.run("go")
        return api.requests[0].body["system"], said(a)

    for target in ("../outside", "/proc/self/environ", "/dev/zero"):
        notes.unlink(missing_ok=True)
        notes.symlink_to(target)
        system, _ = told()
        assert "PLANTED" not in system and "AGENTS.md" not in system
    notes.unlink()
    os.mkfifo(notes)
    (work / "CLAUDE.md").write_text("Use tabs.\n")
    assert told()[0].endswith("from CLAUDE.md:\nUse tabs.\n")
    notes.unlink()
    notes.write_bytes(b"Use \xff blanks. " + b"x" * 25_000 + b"LATE")
    system, screen = told()
    assert "Use \ufffd blanks. xxx" in system and "Use tabs" not in system and "LATE" not in system
    assert "AGENTS.md goes on" in system[-100:] and len(system) < 22_000
    assert "[of AGENTS.md only 20,000 characters are read]" in screen
    notes.write_text("Short.")
    system, screen = told()
    assert system.endswith("\nShort.") and "AGENTS.md" not in screen


@pytest.fixture
def place(monkeypatch):
    """place("XXX-14"): be in that time zone."""

    def move(zone):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        return time.strftime("Today:\n%Y-%m-%d.")

    yield move
    monkeypatch.undo()
    time.tzset()


def test_the_date_is_right_whenever_the_cache_is_cold_and_stays_while_it_is_warm(
    serve, tmp_path, place
):
    api = serve()
    early = place("XXX+12")
    a = make_agent(api, tmp_path)
    late = place("XXX-14")  # another day, at any time
    a.run("one")
    place("XXX+12")
    a.run("two")
    a.model.last_reply = float("-inf")  # the last reply was long ago
    a.run("three")
    days = [early if early in request.body["system"] else late for request in api.requests]
    assert days == [late, late, early]
    assert all(
        day in request.body["system"] for day, request in zip(days, api.requests, strict=True)
    )
