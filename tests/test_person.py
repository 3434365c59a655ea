"""The person at the terminal, act by act, on a real pseudo-terminal; pyte shows what is on the screen.

What single keys, pastes, locales and Ctrl-C do is in test_cases_terminal.py, what the question shows and takes
in test_cases_security.py. A whole screen is compared row by row: `rows` is what the emulator shows, `wrapped`
what it should show, so nothing may overlap, be left over or run past the edge.
"""

import re
import shlex
import termios
import time

import messages_api
import pytest
from harness import PROMPT, ask, command, results, run, said, session, texts
from messages_api import Fault, Reply, call, is_summary, thinking
from test_cases_terminal import Person, typed, wait_for

import agent

QUESTION = "run it? [y]es / [n]o, with a reason / [a]lways "
STATUS = re.compile(r"\[([#.]{10})\] ([\d,]+) of ([\d,]+) tokens; in ([\d,]+) \((\d+) % from cache\), out ([\d,]+)")
ROW = re.compile(r"([ \d,]{7}\d) (#* *) (system   |user     |assistant) (\S.*)")
INITIAL, UP = "agent >>", "\x1b[A"
both_widths = pytest.mark.parametrize("width", [100, 40])


def rows(person):
    """The screen up to its last row that is not empty."""
    return "\n".join(line.rstrip() for line in person.screen.display).rstrip().split("\n")


def wrapped(width, *lines):
    """The rows that these lines fill in a window of that width."""
    return [line[i : i + width].rstrip() for line in lines for i in range(0, max(len(line), 1), width)]


def plain(person):
    """All that was ever written, without escape codes."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", person.raw)


def status(person):
    """The newest status line."""
    return list(STATUS.finditer(plain(person)))[-1][0]


def number(text):
    return int(text.replace(",", ""))


def saw(person, pattern):
    """Read on until this was written at some time, even if it is gone by now."""
    person.until(lambda: re.search(pattern, plain(person)))


def life(word):
    """The line that is seen while nothing else moves, with its seconds."""
    return rf"{word} \(\d+ s\)"


def asked(person, times=1):
    """Read on until the question is there for the first, second ... time."""
    person.until(lambda: len(re.findall(re.escape(QUESTION) + r"\w+: ", plain(person))) == times)


def bash(line):
    return call("bash", {"command": line})


def slow_sdk(folder, seconds):
    """A PYTHONPATH on which the SDK takes that long to import, and files that say how far it is."""
    package = folder / "anthropic"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"""import pathlib, sys, time
here = pathlib.Path(__file__).parent
(here / "begun").touch()
time.sleep({seconds})
(here / "done").touch()
sys.path.remove(str(here.parent))
del sys.modules["anthropic"]
import anthropic
""")
    return str(folder), package / "begun", package / "done"


# ================================ The start ================================


def test_the_prompt_takes_keys_and_leaving_works_while_the_sdk_loads(serve, tmp_path):
    path, begun, done = slow_sdk(tmp_path / "sdk", 10)
    person = Person(serve(), tmp_path, PYTHONPATH=path)
    person.child.send("fox\x7f\x7fit \x1b[D\x1b[Dx")
    person.sees(PROMPT + "fixt ")
    help_text = run(None, tmp_path, "--help", PYTHONPATH=path)
    assert help_text.returncode == 0 and help_text.stdout.startswith("usage: agent.py")
    wait_for(begun.exists)
    person.leave("\x05\x15", "\x04")  # to the end, all away, out
    assert not done.exists()


def test_the_first_answer_comes_when_the_sdk_is_there_and_ctrl_c_does_not_wait_for_it(serve, tmp_path):
    path, _, done = slow_sdk(tmp_path / "sdk", 4)
    api = serve(lambda request: "the answer" if done.exists() else "too early")
    person = Person(api, tmp_path, PYTHONPATH=path)
    person.child.sendline("first")
    saw(person, life("thinking"))
    person.child.sendintr()
    person.prompt()
    assert not done.exists()
    person.ask("second", "the answer")
    person.leave()
    assert len(api.requests) == 1 and typed(api)[0].endswith("second")


# ================================ While it works ================================


@pytest.fixture
def gate(monkeypatch):
    """Each event of a paced reply is sent only when the test lets it pass: gate(n)."""
    passed = [0]

    def pause(handler, seconds):
        if seconds:
            wait_for(lambda: passed[0] > 0 or handler.server.api.closing)
            passed[0] -= 1

    monkeypatch.setattr(messages_api.Handler, "pause", pause)
    return lambda count: passed.__setitem__(0, passed[0] + count)


def test_text_comes_as_it_is_sent_and_a_call_after_it_shows_a_sign_of_life(serve, tmp_path, gate):
    """Nothing of a call is shown before it is complete, but that one is coming must be seen."""
    write = call("write_file", {"path": "f", "content": "x" * 90})
    person = Person(serve([Reply("first,second", write, chunk=6, pace=1, thinks=False), "The end."]), tmp_path, "-y")
    person.child.sendline("go")
    gate(3)  # ping, start of the text, its first part
    person.sees("first,")
    assert "second" not in person.raw
    gate(5)  # its second part, its end, start of the call, two parts of that
    person.sees("first,second")
    saw(person, r"first,second\r\n[^>]*\b\d+ s\b")
    gate(999)
    person.child.expect_exact("The end.")
    person.prompt()
    ran = ["> write_file: f", "  +" + "x" * 90, "  Created f: now 90 bytes, 1 lines."]
    assert rows(person) == [PROMPT + "go", "first,second", *ran, "The end.", status(person), INITIAL]
    person.leave()


@both_widths
def test_waiting_thinking_and_running_are_one_line_that_leaves_nothing(serve, tmp_path, width):
    """A retry that is announced, a slow answer with thinking, a command whose lines are wider than the window."""
    wide = "printf '\\u4f60%.0s' {1..60} && echo"
    long = f"for i in 1 2 3 4 5; do [ $i = 3 ] && {wide} || echo mark$i {{10..25}} mark$i; sleep 0.6; done"
    slow = Reply(thinking("musing"), "I run it.", bash(long), delay=1.3)
    api = serve([Fault(529, headers={"retry-after": "1.3"}), slow, "The end."])
    person = Person(api, tmp_path, "-y", size=(40, width))
    retry = f"[529 from {api.url}: a scripted fault; trying again in 1.3 s]"
    before = wrapped(width, PROMPT + "go", retry, "I run it.", "> bash: " + long)
    person.child.sendline("go")
    saw(person, life("waiting"))
    saw(person, life("thinking"))
    for word in ("mark", "\u4f60"):
        person.until(lambda word=word: len(rows(person)) > len(before) and word in rows(person)[-1])
        assert rows(person)[:-1] == before, "the live tail is one row"
    person.child.expect_exact("The end.")
    person.prompt()
    marks = [f"  mark{i} {' '.join(map(str, range(10, 26)))} mark{i}" for i in (1, 2, 5)]
    preview = [*marks[:2], "  ... 2 more lines", marks[2], "  [exit status 0]"]
    assert rows(person) == before + wrapped(width, *preview, "The end.", status(person), INITIAL)
    assert "musing" not in person.raw
    person.leave()


def test_after_each_turn_one_dim_line_says_where_the_tokens_went(serve, tmp_path):
    used = {"input_tokens": 100, "cache_read_input_tokens": 890, "cache_creation_input_tokens": 10, "output_tokens": 7}
    api = serve([Reply(bash("echo hello"), usage=used), Reply("one", usage=used), Reply("two"), Reply("three", end="stall")])
    person = Person(api, tmp_path, "-y", AGENT_THRESHOLD="3000")
    person.ask("go", "one")
    person.ask("again", "two")
    person.child.sendline("stop")
    person.child.expect_exact("three")
    person.child.sendintr()
    person.prompt()
    person.leave()
    found = list(STATUS.finditer(plain(person)))
    assert len(found) == len(re.findall(r"\x1b\[2m\[[#.]{10}\][^\x1b]*\x1b\[0m\r\n", person.raw)) == 3
    assert found[0].groups()[3:] == ("2,000", "89", "14")
    for line in found:
        bar, tokens, limit = line[1], number(line[2]), number(line[3])
        assert limit == 3000 and bar == "#" * round(tokens / 300) + "." * (10 - round(tokens / 300))
        assert 0 < tokens < limit


# ================================ Questions and commands ================================


def test_changes_are_shown_as_coloured_diffs_before_the_question(serve, tmp_path):
    (tmp_path / "f").write_text("one\ntwo\nthree\n")
    edit = call("edit_file", {"path": "f", "old_text": "two", "new_text": "2"})
    write = call("write_file", {"path": "f", "content": "one\n2\nfour\n"})
    new = call("write_file", {"path": "new", "content": "a\n\nb\n"})
    person = Person(serve([Reply(edit, write, new), "The end."]), tmp_path)
    person.child.sendline("go")
    changes = (["-two", "+2"], [" one", " 2", "-three", "+four"], ["+a", "+", "+b"])
    for times, change in enumerate(changes, 1):
        asked(person, times)
        *_, call_line = (y for y, row in enumerate(rows(person)) if row.startswith("> "))
        lines = range(call_line + 1, person.screen.cursor.y)
        assert [rows(person)[y] for y in lines] == ["  " + line for line in change]
        colour = {"-": "red", "+": "green", " ": "default"}
        assert [person.screen.buffer[y][2].fg for y in lines] == [colour[line[0]] for line in change]
        person.child.send("y\r")
    person.child.expect_exact("The end.")
    person.prompt()
    person.leave()
    assert (tmp_path / "f").read_text() == "one\n2\nfour\n"


def test_commands_of_the_person_never_reach_the_model(serve, tmp_path):
    api = serve(lambda request: "A summary." if is_summary(request) else "ok")
    person = Person(api, tmp_path)
    person.ask("/help", "/exit")
    assert all(word in person.shown() for word in ("/compact", "/clear", "Ctrl-D", "Ctrl-C"))
    person.ask("/nonsense of mine", "there is no /nonsense; /help")
    assert api.requests == []
    person.ask("remember the word fish. " + "and more of it " * 300)
    person.ask("/compact the word fish", "[auto_compact: ")
    assert is_summary(api.requests[1]) and "the word fish" in typed(api)[1].splitlines()[-1]
    person.ask("go on")
    assert "A summary." in texts(api.requests[2].messages)
    person.ask("/clear", "a new conversation")
    person.ask("hello")
    assert texts(api.requests[3].messages) == "hello" and len(api.requests) == 4
    person.leave("/exit\r")


def test_ctrl_c_in_compact_brings_the_prompt_back_and_leaves_no_line_behind(serve, tmp_path):
    api = serve([Reply("ok"), Reply("late", delay=60), "the end"])
    person = Person(api, tmp_path)
    person.ask("go " + "on and " * 400)
    person.child.sendline("/compact")
    saw(person, life("summarising"))
    person.child.sendintr()
    person.prompt()
    wait_for(lambda: api.requests[1].closed_early)
    person.child.send("next")
    person.sees(PROMPT + "next")
    written, end = len(person.raw), time.monotonic() + 1.5
    person.until(lambda: time.monotonic() > end)  # nothing more comes
    assert person.raw[written:] == "" and rows(person)[-1] == PROMPT + "next"
    assert "summarising" not in person.shown()
    person.ask("", "the end")
    person.leave()
    assert texts(api.requests[2].messages).count("on and ") == 400


def test_the_settings_of_the_terminal_are_the_same_after_any_command_and_after_leaving(serve, tmp_path):
    deeds = ["stty -echo", "stty raw </dev/tty", r"printf '\033[?25l\033[8m\033(0'", "sleep 1000; echo late"]
    api = serve([item for deed in deeds for item in (Reply("", bash(deed)), "done")])
    script = f"trap : INT; stty -g >before; {shlex.join(command('-y'))}; stty -g >after"
    person = Person(api, tmp_path, program=["/bin/bash", "-c", script])
    person.prompt()
    prompting = termios.tcgetattr(person.child.child_fd)
    for deed in deeds:
        if "late" in deed:
            person.child.sendline("go")
            saw(person, r"; echo late\r\n[^>]*\b\d+ s\b")
            person.child.sendintr()
            person.prompt()
        else:
            person.ask("go", "done")
        assert termios.tcgetattr(person.child.child_fd) == prompting, deed
    assert not person.screen.cursor.hidden
    person.leave()
    assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()


def test_ctrl_z_and_fg_while_a_command_runs_and_at_the_question(serve, tmp_path):
    api = serve([Reply(bash("touch begun; sleep 1; echo over")), "the end"])
    person = Person(api, tmp_path, program=["/bin/bash", "--norc", "--noprofile", "-i"], PS1="shell$ ")

    def stop_and_go_on():
        person.child.send("\x1a")
        person.child.expect_exact("shell$ ")
        person.child.sendline("fg")
        person.child.expect_exact("agent.main()")

    person.child.expect_exact("shell$ ")
    person.child.sendline(shlex.join(command()))
    person.prompt()
    person.child.sendline("go")
    asked(person)
    stop_and_go_on()
    person.child.send("y\r")
    wait_for((tmp_path / "begun").exists)
    stop_and_go_on()
    person.child.expect_exact("the end")
    person.prompt()
    person.child.sendline("exit")
    person.child.expect_exact("shell$ ")
    person.leave()
    assert "over" in results(api.requests[1].messages)[0]["content"]


# ================================ Typing ================================


def test_the_arrow_brings_prompts_back_but_no_answers_to_questions(serve, tmp_path):
    api = serve([Reply(bash("true")), "one", "two", "three"])
    person = Person(api, tmp_path)
    person.child.sendline("first")
    asked(person)
    person.child.send("y\r")
    person.child.expect_exact("one")
    person.prompt()
    person.ask("second", "two")
    for text in ("second", "first"):
        person.child.send(UP)
        person.until(lambda text=text: rows(person)[-1] == PROMPT + text)
    person.ask("", "three")
    person.leave()
    assert typed(api)[-1].endswith("first")


def test_a_long_prompt_in_a_narrow_window_that_changes_while_it_is_typed(serve, tmp_path):
    api = serve()
    person = Person(api, tmp_path, size=(24, 100))
    text = "".join(f"{i:02d}." for i in range(20))
    person.child.send(text)
    person.sees(text)
    for width in (40, 100, 40):
        person.child.setwinsize(24, width)
        person.screen.resize(24, width)
        text = "A" + text + "z"
        person.child.send("\x01A\x05z\x0c")  # home, A, end, z, a fresh screen
        shown, column = wrapped(width, PROMPT + text), len(PROMPT + text) % width
        person.until(lambda shown=shown, column=column: (rows(person), person.screen.cursor.x) == (shown, column))
    person.ask("")
    long = "".join(f"{i:04d}-" for i in range(2000))
    for i in range(0, 10_000, 1000):
        person.child.send(long[i : i + 1000])
        person.sees(long[i + 970 : i + 1000])
    person.ask("\x01>\x05<")
    person.leave()
    assert typed(api) == [text, ">" + long + "<"]


# ================================ Without a person, without colours ================================


def test_one_task_on_a_terminal_shows_the_answer_and_nothing_left_of_the_waiting(serve, tmp_path):
    person = Person(serve([Reply("The answer.", delay=1.3)]), tmp_path, program=command("-p", "go"))
    saw(person, life("thinking"))
    person.leave("")
    assert rows(person) == ["The answer.", status(person)]


def test_a_terminal_in_the_c_locale_takes_and_shows_what_it_can(serve, tmp_path):
    api = serve([Reply("Schön → 😀", bash("echo grün")), "The end."])
    person = Person(api, tmp_path, "-y", LC_ALL="C", LANG="C", PYTHONUTF8="", PYTHONIOENCODING="")
    person.ask("grüße", "The end.")
    person.leave()
    assert typed(api)[0] == "grüße" and "grün" in results(api.requests[1].messages)[0]["content"]


# ================================ A newcomer ================================


@both_widths
def test_the_first_acts_of_a_newcomer_screen_by_screen(serve, tmp_path, width):
    (tmp_path / "stats.py").write_text("ordered = [1, 2, 3]\nmiddle = 1\n")
    check, edit = "python3 stats.py && echo it runs without an error", {"old_text": "middle = 1", "new_text": "middle = 2"}
    api = serve([
        Reply("Let me see.", call("read_file", {"path": "stats.py"}), bash(check)),
        Reply(call("edit_file", {"path": "stats.py", **edit})),
        "As you like: the file stays as it is, and everything in it still works.",
        Reply("Once upon a time", end="stall"),
        "Where were we? There.",
    ])
    person = Person(api, tmp_path, size=(90, width))
    screen = [INITIAL]
    assert rows(person) == screen

    def now(*lines):
        screen[-1:] = [*lines, INITIAL] if lines[-1].startswith("[") or lines[-1].endswith(" tokens") else lines
        assert [row.removesuffix("^C") for row in rows(person)] == wrapped(width, *screen)

    person.child.sendline("fix the middle")
    asked(person)
    line, again = (f"  {QUESTION}{what}:" for what in ("this", "edit_file"))
    now(PROMPT + "fix the middle", "Let me see.", "> read_file: stats.py", "  ordered = [1, 2, 3]", "  middle = 1",
        "> bash: " + check, line)
    person.child.send("y\r")
    asked(person, 2)
    now(line + " y", "  it runs without an error", "  [exit status 0]", "> edit_file: stats.py", "  -middle = 1",
        "  +middle = 2", again)
    person.child.send("n, leave it\r")
    person.prompt()
    now(again + " n, leave it", "  Not run: the user said no. leave it",
        "As you like: the file stays as it is, and everything in it still works.", status(person))
    person.child.sendline("tell me a story")
    person.child.expect_exact("upon a time")
    person.child.sendintr()
    person.prompt()
    now(PROMPT + "tell me a story", "Once upon a time", "[interrupted]", status(person))
    before = len(person.raw)
    person.child.sendline("/context")
    person.prompt()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", person.raw[before:]).split("\n")
    table = [line for line in lines if ROW.fullmatch(line)]
    roles = ["system", "user", "assistant", "user", *["user", "assistant"] * 3, "user"]  # each result has its row
    assert [ROW.fullmatch(row)[3].strip() for row in table] == roles
    assert lines[-2].endswith(" of 100,000 tokens")
    now(PROMPT + "/context", *table, lines[-2])
    person.leave()

    back = Person(api, tmp_path, "-c", size=(90, width))
    [name] = re.findall(r"continued (\S+): ", plain(back))
    assert rows(back) == wrapped(width, f"[continued {name}: 10 messages, 0 broken lines skipped]", INITIAL)
    assert (tmp_path / f".transcripts/{name}.jsonl").is_file()
    back.ask("go on", "There.")
    assert rows(back)[-1] == INITIAL and rows(back).count("Where were we? There.") == 1
    back.leave()
    told = texts(api.requests[-1].messages)
    assert all(words in told for words in ("fix the middle", "leave it", "Once upon a time", "tell me a story", "go on"))


# ================================ /context, /yes, earlier prompts, what was forgotten ================================


def context(session):
    """What /context shows: rows (those of at most 79 characters hold no address), sizes that add up, the threshold."""
    start = len(said(session))
    agent.show_context(session)
    *lines, last = said(session)[start:].lstrip("\n").splitlines()
    total, limit = [number(found) for found in re.fullmatch(r" *([\d,]+) of ([\d,]+) tokens", last).groups()]
    table = [ROW.fullmatch(line) for line in lines]
    assert all(table) and all(len(row[2]) == 16 and (len(row[0]) <= 79) != (".transcripts/" in row[4]) for row in table)
    sizes = [number(row[1]) for row in table]
    assert total == agent.count_tokens(session, session.messages) and abs(sum(sizes) - total) <= len(sizes)
    assert max(len(row[2].strip()) for row in table) == 16
    assert all(abs(len(row[2].strip()) - 16 * size / max(sizes)) <= 1 for row, size in zip(table, sizes, strict=True))
    return [(row[3].strip(), row[4]) for row in table], limit


def test_context_shows_a_row_for_each_message_and_their_sum_is_the_agents_own_count(serve, tmp_path):
    s = session(serve(), tmp_path)
    assert context(s)[0] == [("system", "text system prompt and tools")]
    s.add("user", "fix   the test")
    s.add("assistant", [{"type": "thinking", "thinking": "musing", "signature": "x" * 400},
                        {"type": "text", "text": "Let me see."},
                        {"type": "tool_use", "id": "a", "name": "bash", "input": {"command": "pytest -q"}}])
    s.add("user", [{"type": "tool_result", "tool_use_id": "a", "content": "3 passed\n[exit status 0]"}])
    s.add("assistant", [{"type": "text", "text": "All is well. " * 30}])
    kinds, limit = context(s)
    assert limit == 100_000
    assert kinds[1:4] == [("user", "text fix the test"), ("assistant", "thinking | text Let me see. | bash pytes..."),
                          ("user", "tool_result 3 passed [exit status 0]")]
    assert kinds[4][0] == "assistant" and kinds[4][1].startswith("text All is well. All is well.")
    assert "musing" not in said(s)


@pytest.mark.parametrize("ratio", [1.0, 1.37])
def test_context_adds_up_for_three_hundred_messages_of_any_size(serve, tmp_path, ratio):
    s = session(serve(), tmp_path)
    for i in range(75):
        s.add("user", f"prompt {i} \x1b[2J\n" + "word " * (i % 7))
        s.add("assistant", [{"type": "text", "text": "你好 " * i + "."},
                            {"type": "tool_use", "id": f"id{i}", "name": "bash", "input": {"command": "x" * i * i}}])
        s.add("user", [{"type": "tool_result", "tool_use_id": f"id{i}", "content": "line\n" * i * i or "x"}])
        s.add("assistant", [{"type": "text", "text": "é" * (i * 37 % 101 + 1)}])
    s.ratio = ratio
    assert [role for role, _ in context(s)[0]] == ["system"] + ["user", "assistant"] * 150
    assert "\x1b" not in said(s)


def test_context_says_where_that_is_which_was_forgotten(serve, tmp_path):
    def script(request):
        done = len(results(request.messages))
        return "A summary." if is_summary(request) else Reply(bash(f"seq {done}000 {done}900")) if done < 3 else "the end"

    s = session(serve(script), tmp_path, keep_recent=1, clear_at_least=0)
    ask(s, "count")
    gone = [result["content"] for result in results(s.messages) if result["content"].startswith("[Previous: used")]
    rows = [text for _, text in context(s)[0] if ".transcripts/" in text]
    assert len(gone) == 2 and rows == [f"tool_result {text}" for text in gone]
    assert agent.auto_compact(s)
    assert context(s)[0][1][1].startswith(f"text [Conversation compressed. Transcript: {s.transcript.name}]")


def test_yes_turns_asking_off_and_on_again(serve, tmp_path):
    api = serve([Reply(bash("touch unasked")), "one", Reply(bash("touch asked")), "two"])
    person = Person(api, tmp_path)
    person.ask("/yes", "[no longer asking")
    person.ask("go", "one")
    assert "[a]lways" not in person.raw and (tmp_path / "unasked").exists()
    person.ask("/yes", "[asking")
    person.child.sendline("go")
    asked(person)
    person.child.send("n\r")
    person.child.expect_exact("two")
    person.prompt()
    person.ask("/help", "/exit")
    assert "/yes" in person.shown() and "/context" in person.shown()
    person.leave()
    assert not (tmp_path / "asked").exists()


def test_the_arrow_brings_prompts_of_earlier_conversations_of_this_directory(serve, tmp_path):
    """They stand in the transcripts, which are private; what was piped in, and what is broken, is none."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder, prompts in ((here, ["one", 'two "lines"\nin one']), (elsewhere, ["not this"]), (here, ["three", "a \0 b"])):
        folder.mkdir(exist_ok=True)
        s = session(serve(), folder)
        for prompt in prompts:
            ask(s, prompt)
        ask(s, "[Standard input]\na log\n\nlook at it")
        time.sleep(1.1)  # the newest is known by its name, which has seconds
    (here / ".transcripts/29990101T000000Z-0.jsonl").write_bytes(b'{"role": "user", "content": "cut\n\xff\n')
    (here / ".transcripts/29990101T000001Z-0.jsonl").mkdir()
    api = serve()
    person = Person(api, here)
    for row in (PROMPT + "three", "in one", PROMPT + "one"):
        person.child.send(UP)
        person.until(lambda row=row: rows(person)[-1] == row)
    person.ask("")
    person.leave()
    assert typed(api) == ["one"] and "not this" not in person.raw and "a log" not in person.raw


def test_a_conversation_goes_on_in_a_locale_that_does_not_know_what_was_typed(serve, tmp_path):
    ask(session(serve(), tmp_path), "h\u00e9llo \U0001f600")
    api = serve()
    person = Person(api, tmp_path, "-c", LC_ALL="C", PYTHONUTF8="")
    person.ask("more")
    person.leave()
    assert "h\u00e9llo \U0001f600" in texts(api.requests[0].messages)


def test_the_status_line_says_how_much_was_forgotten_in_that_turn_only(serve, tmp_path):
    def script(request):
        done = len(results(request.messages))
        return Reply(bash(f"yes {done} | head -c 20000")) if done < 2 and "forget" in texts(request.messages) else "ok"

    s = session(serve(script), tmp_path, keep_recent=1, clear_at_least=0)
    for prompt, forgets in (("hello", False), ("forget", True), ("hello", False)):
        start = len(said(s))
        s.add("user", prompt)
        assert agent.turn(s) == 0
        [line] = [line for line in said(s)[start:].splitlines() if STATUS.match(line)]
        found = re.search(r"out [\d,]+; forgot ([\d,]+)$", line)
        assert bool(found) == forgets
        assert not found or 4_500 < number(found[1]) < 8_000
