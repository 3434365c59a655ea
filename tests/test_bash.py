"""The bash tool: what a command gets, what comes back from it, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pexpect
import pytest
from harness import (
    KEY,
    PROMPT,
    ROOT,
    agent,
    make_agent,
    processes,
    results,
    run,
    said,
    terminal,
    texts,
)
from messages_api import Reply, call

# The tool in a process of its own, without a model. Prints the memory it took, and the results.
ALONE = """import json, sys
import agent
agent.MAX_OUTPUT = 25_000_000
a = agent.Agent(agent.Settings(), ".")
found = []
for number, command in enumerate(sys.argv[1:]):
    a.running = {"id": f"call{number}"}
    found.append(agent.clip(agent.bash(a, command), 24_000))
memory = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]
print(json.dumps([int(memory), *found]))"""
INTERRUPTED = "[interrupted by the user; its processes were killed]"
GIT = "git -c user.name=t -c user.email=t@example.invalid"


def batch(*commands: str, **arguments: Any) -> Reply:
    """One reply that calls bash once for each command."""
    return Reply(*[call("bash", {"command": each, **arguments}) for each in commands])


def answers(api: Any) -> list[str]:
    """The results in the newest request."""
    return [result["content"] for result in results(api.requests[-1].messages)]


def bash(a: agent.Agent, command: str, **arguments: Any) -> str:
    """One call of the tool, without a model."""
    a.running = {"id": f"call{time.monotonic_ns()}"}
    return agent.bash(a, command, **arguments)


def outputs(a: agent.Agent, *commands: str) -> list[str]:
    return [bash(a, command) for command in commands]


def alone(cwd: Path, *commands: str, python: Any = sys.executable, **env: str) -> list[Any]:
    """The memory that the program took (kB), and the results."""
    line = [python, "-c", ALONE, *commands]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(line, cwd=cwd, env=env, capture_output=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


def new_output(a: agent.Agent) -> tuple[agent.Output, int]:
    """The output of a command, and the end of the pipe that the command writes to."""
    reader, writer = os.pipe()
    pipe = os.fdopen(reader, "rb", buffering=0)
    return agent.Output(pipe, a.settings, hides_record=True), writer


def kept(folder: Path) -> list[Path]:
    """The files with whole outputs."""
    return sorted((folder / ".transcripts").glob("*/*.txt"))


def all_bytes(folder: Path) -> bytes:
    """All that the agent has written to disk."""
    files = [file for file in (folder / ".transcripts").rglob("*") if file.is_file()]
    return b"".join(file.read_bytes() for file in files)


def until(holds: Callable[[], Any], seconds: float = 30) -> Any:
    """Wait until something holds. Returns whether it does."""
    end = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def gone(mark: str) -> bool:
    """No process with this mark is left, at the latest after a while."""
    return until(lambda: not processes(mark), seconds=10)


@contextmanager
def interrupted_at(*names: str, event: str = "call") -> Iterator[None]:
    """Ctrl-C at exact moments: when each of these functions is called, one after the other."""
    waiting = list(names)
    files = (agent.__file__, subprocess.__file__)

    def watch(frame: Any, what: str, _: Any) -> None:
        code = frame.f_code
        if [code.co_name] == waiting[:1] and what == event and code.co_filename in files:
            waiting.pop(0)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert waiting == []


@contextmanager
def disposition(number: int, what: Any) -> Iterator[None]:
    """What a program finds that this signal does, when it starts."""
    before = signal.signal(number, what)
    try:
        yield
    finally:
        signal.signal(number, before)


def signal_when(file: Path, number: int = signal.SIGINT) -> None:
    """Send this process a signal, Ctrl-C for one, as soon as a file is there."""

    def send() -> None:
        if until(file.exists):
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.fixture
def a(serve: Any, tmp_path: Path) -> agent.Agent:
    return make_agent(serve(), tmp_path)


@pytest.fixture
def marks() -> Iterator[list[str]]:
    """Commands that sleep long and are found by their text; they are ended after the test."""
    listed = [f"sleep 98765.{os.getpid()}{number}" for number in range(4)]
    yield listed
    for pid in [pid for mark in listed for pid in processes(mark)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ================================ The result ================================


def test_a_result_has_both_streams_in_order_and_says_how_the_command_ended(a):
    mixed, signalled, late, closed = outputs(
        a,
        "echo one; echo two >&2; echo three; exit 9",
        "echo before; kill -TERM $$",
        "seq 1 90000; echo the last line >&2; exit 4",
        "exec >&- 2>&-; exit 6",
    )
    assert mixed == "one\ntwo\nthree\n[exit status 9]"
    assert signalled == "before\n[killed by signal 15]"
    assert late.startswith("1\n2\n") and late.endswith("\n90000\nthe last line\n[exit status 4]")
    assert closed == "(no output)\n[exit status 6]"


def test_success_failure_and_an_error_are_told_apart_though_nothing_was_printed(serve, tmp_path):
    api = serve([batch("true", "false", "exit 5"), "All ran."])
    assert make_agent(api, tmp_path).run("Run them.") == "All ran."
    found = results(api.requests[-1].messages)
    assert [result["content"] for result in found] == [
        f"(no output)\n[exit status {status}]" for status in (0, 1, 5)
    ]
    assert not [result for result in found if "is_error" in result]  # the tool did what it should


def test_a_command_may_open_its_own_output_streams(a):
    by_name, by_tee = outputs(
        a,
        "echo a; echo b >/dev/stderr; echo c; echo d >/dev/stdout; echo e",
        "printf 'up\\ndown\\n' | tee /dev/stderr",
    )
    assert by_name == "a\nb\nc\nd\ne\n[exit status 0]"
    assert sorted(by_tee.splitlines()[:-1]) == ["down", "down", "up", "up"]


def test_a_search_through_all_files_never_meets_its_own_output(a, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the output is while it runs
    (tmp_path / "list").write_text("needle\n" * 400)
    search = "find . -type f | xargs sed -n /needle/p; grep -rh needle .; cat $(find . -type f)"
    [answer] = outputs(a, search)
    assert answer.count("needle\n") == 1200 and answer.endswith("\n[exit status 0]")


def test_a_long_output_is_kept_whole_in_a_file_and_a_short_one_is_not(a, tmp_path):
    short, long = outputs(a, "echo short", "seq 1 20000")
    [file] = kept(tmp_path)
    assert file.read_text() == "".join(f"{i}\n" for i in range(1, 20001))
    assert ".transcripts" not in short + long  # where it is, is said where the result is cut


def test_the_note_in_a_cut_result_names_the_file_with_the_whole(serve, tmp_path):
    api = serve([batch("seq 1 30000"), "Done."])
    make_agent(api, tmp_path).run("Count.")
    [answer] = answers(api)
    [file] = kept(tmp_path)
    assert len(answer) <= 24_000 and str(file.relative_to(tmp_path)) in answer
    assert answer.startswith("1\n2\n3\n") and answer.endswith("\n30000\n[exit status 0]")
    assert file.read_text().count("\n") == 30_000


def test_the_screen_shows_the_command_and_its_result_in_short(serve, tmp_path):
    a = make_agent(serve([batch("echo out; echo err >&2; exit 7"), "Done."]), tmp_path)
    a.run("Run it.")
    lines = said(a).splitlines()
    at = lines.index("> bash: echo out; echo err >&2; exit 7")
    assert [line.strip() for line in lines[at + 1 : at + 4]] == ["out", "err", "[exit status 7]"]


# ================================ What is readable ================================


def test_bytes_that_are_no_utf8_arrive_as_replacement_marks(a, tmp_path):
    (tmp_path / "picture").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\xff\xfe\0IEND\xae\x82")
    odd, picture, noise = outputs(
        a, r"printf 'A\377\376B\n'", "cat picture", "head -c 5000 /dev/urandom"
    )
    assert odd == "A\ufffd\ufffdB\n[exit status 0]"
    assert "PNG" in picture and "IEND" in picture and "\0" not in picture
    assert "\ufffd" in noise and noise.endswith("[exit status 0]")


@pytest.mark.parametrize("lead", ["", "a", "ab"])
def test_a_character_is_never_cut_in_two(serve, tmp_path, lead):
    (tmp_path / "euros").write_text(lead + "\u20ac" * 400_000, encoding="utf-8")
    api = serve([batch("cat euros"), "Done."])
    make_agent(api, tmp_path, threshold=10_000).run("Show it.")
    [answer] = answers(api)
    assert answer.startswith(lead + "\u20ac\u20ac") and "\ufffd" not in answer
    assert 500 < answer.count("\u20ac") < 4_000


def test_odd_bytes_are_no_trouble_in_the_c_locale(tmp_path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    _, short, long = alone(
        tmp_path,
        r"printf 'A\377B\n\342\202\254\n'",
        r"printf '\377\342\202\254%.0s' {1..200}",
        **locale,
    )
    assert short == "A\ufffdB\n\u20ac\n[exit status 0]"
    assert long == "\ufffd\u20ac" * 200 + "\n[exit status 0]"
    assert kept(tmp_path)[0].read_bytes() == b"\xff\xe2\x82\xac" * 200


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"\x1b[1;31mred\x1b[0m \x1b[38;5;200mpink\x1b[m end\n", "red pink end"),
        (b"\x1b[2J\x1b[10;10H\x1b[?25lclear\x1b[K\n", "clear"),
        (b"\x1b]0;a title\x07text\x1b]8;;http://x\x1b\\ link\n", "text link"),
        (b"a\x08b\x00c\x7f\n\n", "abc"),
        (b"one\r\ntwo\r\r\nthree\n", "one\ntwo\nthree"),
        (b"1%\r50%\r99%", "99%"),
        (b"1%\r50%\r99%\r", "99%"),
        (b"".join(b"\r%d%% [##..]" % i for i in range(100)) + b"\ndone\n", "99% [##..]\ndone"),
        (b"alpha one\rbeta two\rgamma three\r", "alpha one\nbeta two\ngamma three"),
    ],
)
def test_the_model_sees_the_text_without_codes_and_of_progress_the_last_state(printed, shown):
    assert agent.readable(printed) == shown


@pytest.mark.parametrize("code", [b"\x1b]", b"\x1bP", b"\x1b[", b"\x1b]0;"])
def test_an_escape_code_without_an_end_hides_no_text(code):
    shown = agent.readable(b"first\n" + code + b"SECOND LINE\nthird\n")
    assert shown.startswith("first\n") and shown.endswith("\nthird")
    assert "ECOND LINE" in shown and "\x1b" not in shown


def test_the_file_has_the_bytes_as_they_were_printed(a, tmp_path):
    data = b"\x1b]no end \xff\r" + b"\x1b[31mred\x1b[0m\r\n\0" * 50
    (tmp_path / "data").write_bytes(data)
    bash(a, "cat data")
    assert [file.read_bytes() for file in kept(tmp_path)] == [data]


def test_broken_codes_and_endless_progress_are_cleaned_in_linear_time():
    size = 200_000
    kinds = [
        b"\r50%" * (size // 4),
        b"\x1b[" * size,
        b"\x1b" * size,
        b"\x1b[" + b"0" * size,
        b"\x1b]" + b"x" * size,
        b"\x1b]xxxx" * size,
        b"\x1b " + b" " * size,
        b"\x1b[0 " * size,
        b"a\r" * (size // 4) + b"b" * size,
    ]
    start = time.monotonic()
    shown = [agent.readable(kind + b"\nEND\n") for kind in kinds]
    assert time.monotonic() - start < 60  # a pattern that goes back and forth takes minutes
    assert not [text for text in shown if "\x1b" in text or not text.endswith("END")]
    assert shown[0] == "50%\nEND"


# ================================ What a command gets ================================


def test_no_word_in_a_command_keeps_it_from_running(a, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/setup.txt").write_text("use sudo here\n")
    text = "".join(f"{i}: rm -rf / && :(){{ :|:& }};: > /dev/sda\n" for i in range(60))
    found, commit, removed, here = outputs(
        a,
        "grep -r sudo docs 2>/dev/null",
        f"git init -q .; {GIT} commit -q --allow-empty -m 'fix the reboot'; git log --format=%s",
        "rm -rf ./docs; echo shutdown done",
        f"cat > script.txt <<'END'\n{text}END",
    )
    assert found == "docs/setup.txt:use sudo here\n[exit status 0]"
    assert commit == "fix the reboot\n[exit status 0]"
    assert removed == "shutdown done\n[exit status 0]" and not (tmp_path / "docs").exists()
    assert here == "(no output)\n[exit status 0]" and (tmp_path / "script.txt").read_text() == text


def test_commands_run_in_bash_as_they_stand(a, tmp_path, monkeypatch):
    (tmp_path / "v.sh").write_text("V='the value'\n")
    (tmp_path / "startup").write_text("echo started\n")
    features, zero = outputs(
        a,
        "set -o pipefail; false | true; echo $?; [[ abc == a* ]] && . ./v.sh && echo $V {1..3}",
        "echo $#; cat; echo 'a\nb' \"c\"",
    )
    assert features == "1\nthe value 1 2 3\n[exit status 0]"
    assert zero == "0\na\nb c\n[exit status 0]"
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "startup"))
    dash = bash(a, "-x")
    assert dash.count("started") == 1 and dash.endswith("-x: command not found\n[exit status 127]")


def test_each_call_is_a_new_shell_in_the_working_directory(serve, tmp_path):
    file = call("write_file", {"path": "here.txt", "content": "here\n"})
    api = serve([batch("mkdir sub; cd sub; export Q=1; pwd", "pwd; echo q=$Q"), Reply(file), "ok"])
    make_agent(api, tmp_path).run("Go.")
    first, second, _ = answers(api)
    assert first.startswith(f"{tmp_path}/sub\n") and second.startswith(f"{tmp_path}\nq=\n")
    assert (tmp_path / "here.txt").exists() and not (tmp_path / "sub/here.txt").exists()
    [tool] = [tool for tool in api.requests[0].body["tools"] if tool["name"] == "bash"]
    assert "cd and variables do not last" in tool["description"]


def test_a_command_gets_the_users_environment_without_the_keys(serve, tmp_path, monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_OTHER"):
        monkeypatch.setenv(name, "a-SENTINEL-of-a-key")
    monkeypatch.setenv("FOO", "foo is here")
    monkeypatch.setenv("PAGER", "less")
    shown = ["env", "python3 -c 'import os; print(dict(os.environ))'", "cat /proc/self/environ"]
    api = serve([batch(*shown), "Done."])
    a = make_agent(api, tmp_path)
    a.run("Show the environment.")
    for answer in answers(api):
        assert "foo is here" in answer and os.environ["PATH"] in answer and "less" not in answer
    bodies = json.dumps([request.body for request in api.requests])
    assert "SENTINEL" not in bodies + said(a) and b"SENTINEL" not in all_bytes(tmp_path)


@pytest.mark.parametrize("is_private", [True, False])
def test_only_an_environment_made_for_this_file_alone_is_hidden(tmp_path, is_private):
    own = tmp_path / ("cache/environments-v2/agent-1" if is_private else "venv")
    users = tmp_path / "project/.venv/bin"
    users.mkdir(parents=True)
    (users / "python3").symlink_to(sys.executable)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", own], check=True)
    [_, answer] = alone(
        tmp_path,
        "command -v python3; echo env=$VIRTUAL_ENV; command -v ls",
        python=own / "bin/python",
        PATH=os.pathsep.join([f"{own}/bin", str(users), os.environ["PATH"]]),
        VIRTUAL_ENV=str(own),
    )
    python, variable, ls = answer.splitlines()[:3]
    assert python == (f"{users}/python3" if is_private else f"{own}/bin/python3")
    assert variable == ("env=" if is_private else f"env={own}") and ls.endswith("ls")


WAITING = [
    "cat; read x; echo got=$x; python3; less file | tail -1",
    f"git init -q repo; cd repo; touch new; git add new; {GIT} commit",
    "ssh -o StrictHostKeyChecking=ask -o ConnectTimeout=5 127.0.0.1",
    "sudo -k; sudo true",
    "echo asked >/dev/tty",
    "read -r x </dev/tty; echo answer=$x",
    r"printf '\033[2J\033[?25l\033]0;STOLEN\007\033[31mred text\n'",
]


def nothing_was_asked(found: list[str], raw: str) -> None:
    files, git, _, sudo, tty, question, colours = found
    assert files == "got=\nlast line\n[exit status 0]"
    assert "exit status 0" not in git and "timed out" not in git + sudo
    assert "/dev/tty" in tty and "answer=\n" in question
    assert colours == "red text\n[exit status 0]"
    assert not re.search(r"(?im)^(\[sudo\]|.*password( for \S+)?: *$|asked)", raw)
    assert not [code for code in ("\x1b]", "\x1b[2J", "\x1b[?25l") if code in raw]


def test_no_command_takes_the_terminal_and_none_outlives_it(serve, tmp_path, marks):
    (tmp_path / "file").write_text("line\n" * 200 + "last line\n")
    last = f"touch started; set -m; {marks[0]} & {marks[1]}"
    api = serve([batch(*WAITING), "All came back.", batch(last)])
    env = {name: "" for name in ("EDITOR", "VISUAL", "GIT_EDITOR", "SSH_ASKPASS", "DISPLAY")}
    env |= {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "NO_COLOR": "1"}
    with disposition(signal.SIGHUP, signal.SIG_DFL):
        child = terminal(api, tmp_path, "-y", **env)
    child.logfile_read = screen = io.StringIO()
    child.sendline("Run them.")
    child.expect_exact("All came back.")
    child.expect_exact(PROMPT)
    child.sendline("And one that stays.")
    assert until((tmp_path / "started").exists)
    nothing_was_asked(answers(api), screen.getvalue())
    child.kill(signal.SIGHUP)  # what a terminal sends when it is closed
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 128 + signal.SIGHUP
    assert gone(marks[0]) and gone(marks[1]) and "Traceback" not in screen.getvalue()


# ================================ Limits ================================


def test_a_time_limit_kills_everything_that_the_command_started(a, marks):
    stubborn, job, grouped, shell = marks
    answer = bash(
        a,
        f"echo early; (trap '' TERM; exec {stubborn}) & for i in {{1..100}}; do {job} & done; "
        f"set -m; timeout 99 {grouped} & {shell}",
        timeout=2,
    )
    assert answer == "early\n[timed out after 2 s; its processes were killed]"
    assert [mark for mark in marks if not gone(mark)] == []


def test_a_call_without_a_time_limit_gets_that_of_the_settings(serve, tmp_path):
    a = make_agent(serve(), tmp_path, bash_timeout=0.4)
    pouring = bash(a, "while :; do echo line; done")
    assert pouring.startswith("line\nline\n") and "timed out after 0.4 s" in pouring[-80:]
    assert "timed out after 0.4 s" in bash(a, "sleep 999", timeout=0)
    assert bash(a, "sleep 0.6; echo late", timeout=60) == "late\n[exit status 0]"


@pytest.mark.parametrize("limit", [-1, -0.5, 86_400, 10**9])
def test_a_time_limit_that_makes_no_sense_is_an_error_and_nothing_runs(serve, tmp_path, limit):
    api = serve([batch("touch ran", timeout=limit), "I see."])
    a = make_agent(api, tmp_path)
    assert a.run("Go.") == "I see."
    [result] = results(api.requests[-1].messages)
    assert result["is_error"] and "timeout" in result["content"] and "3,600" in result["content"]
    assert not (tmp_path / "ran").exists()
    assert "at most 3,600" in agent.TOOLS["bash"].description("bash")["description"]


def test_endless_output_ends_the_command_and_fills_neither_memory_nor_the_result(tmp_path):
    memory, lines, zeros = alone(tmp_path, "yes 'some line'", "cat /dev/zero")
    assert memory < 360_000  # kB; the program alone has some 30 MB
    killed = "\n[killed, with its processes: it wrote more than 25,000,000 bytes]"
    assert lines.startswith("some line\nsome line\n") and lines.endswith("some line" + killed)
    assert zeros.endswith(killed)
    assert [file.stat().st_size < 26_000_000 for file in kept(tmp_path)] == [True, True]


def test_calls_leave_no_open_files_behind(a, tmp_path):
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    bash(a, "echo one")
    before = count()
    bash(a, "echo two")
    assert count() <= before
    with pytest.raises(OSError, match="too long"):
        bash(a, ": " + "x" * 200_000)
    assert count() <= before
    bash(a, "sleep 0.1 & echo three")
    assert until(lambda: count() <= before, seconds=5)


# ================================ Background jobs ================================


def test_a_background_job_holds_no_call_and_lives_on(serve, tmp_path, marks):
    commands = [
        f"{marks[0]} & echo started",
        f"(setsid {marks[1]} &); echo apart",
        f"nohup {marks[2]} >/dev/null 2>&1 & echo quiet",
        f"{marks[3]} & printf 'no line end'",
    ]
    api = serve([batch(*commands), batch("echo next"), "Done."])
    assert make_agent(api, tmp_path).run("Start them.") == "Done."
    for answer, word in zip(answers(api), ["started", "apart", "quiet", "no", "next"], strict=True):
        assert answer.split()[0] == word and "[exit status 0]" in answer
    assert [len(processes(mark)) for mark in marks] == [1, 1, 1, 1]
    assert "live on while the agent runs" in agent.TOOLS["bash"].description("bash")["description"]


def test_what_a_background_job_prints_later_can_be_read_where_the_result_says(a, tmp_path, marks):
    job = f"until [ -e go ]; do sleep 0.05; done; echo later; cat key; touch printed; {marks[0]}"
    (tmp_path / "key").write_text(KEY + "\n")
    answer = bash(a, f"({job}) & echo now")
    found = re.search(r"background prints to (\.transcripts/\S+\.txt)\]$", answer)
    assert found and answer.startswith("now\n[exit status 0]\n")
    assert agent.read_file(a, found[1]) == "now"
    (tmp_path / "go").touch()
    assert until((tmp_path / "printed").exists)
    assert until(lambda: agent.read_file(a, found[1]) == "now\nlater\n[key removed]")
    assert len(processes(marks[0])) >= 1  # nobody closed its pipe


def test_a_background_job_fills_its_file_only_up_to_the_limit(a, tmp_path, marks, monkeypatch):
    monkeypatch.setattr(agent, "MAX_OUTPUT", 500_000)
    mark = marks[0].replace("sleep", "yes")
    bash(a, f"(sleep 0.1; exec {mark}) & echo started")
    [file] = kept(tmp_path)
    sizes = [-1]

    def at_rest() -> bool:
        time.sleep(0.2)
        sizes.append(file.stat().st_size)
        return sizes[-1] > 1_000_000 or (sizes[-1] == sizes[-2] and sizes[-1] > 400_000)

    pids = until(lambda: processes(mark))
    assert until(at_rest)
    still_there = processes(mark)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert 500_000 <= sizes[-1] < 700_000 and still_there == pids


def test_what_a_job_prints_stands_in_its_file_once(a, tmp_path):
    """Also a line that had not ended when the call did."""
    bash(a, "printf half; (until [ -e go ]; do sleep 0.05; done; echo ' and half') &")
    [file] = kept(tmp_path)
    (tmp_path / "go").touch()
    assert until(lambda: file.read_bytes() == b"half and half\n")


def test_a_key_of_which_a_job_prints_the_second_half_is_on_no_disk(a, tmp_path):
    first, second = KEY[:9], KEY[9:]
    wait = "until [ -e go ]; do sleep 0.05; done"
    bash(a, f"printf '%s' {first}; ({wait}; echo {second}; echo end) &")
    (tmp_path / "go").touch()
    [file] = kept(tmp_path)
    assert until(lambda: file.read_bytes().endswith(b"end\n"))
    assert file.read_bytes() == b"[key removed]\nend\n"


def test_without_a_place_for_its_output_no_command_runs_on(serve, tmp_path, marks, monkeypatch):
    def full(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(agent.tempfile, "TemporaryFile", full)
    api = serve([batch(marks[0]), "Done."])
    assert make_agent(api, tmp_path).run("Start it.") == "Done."
    [answer] = answers(api)
    assert "No space left on device" in answer and gone(marks[0])


def test_a_background_job_does_not_keep_the_agent_from_ending(serve, tmp_path, marks):
    api = serve([batch(f"{marks[0]} & echo started"), "Done."])
    ended = run(api, tmp_path, "-y", "-p", "Start it.", timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "Done.\n")


def test_without_a_record_the_result_says_that_later_output_is_lost(a, tmp_path, marks):
    (tmp_path / ".transcripts").write_text("in the way")
    job = f"until [ -e go ]; do sleep 0.05; done; echo later; touch printed; {marks[0]}"
    answer = bash(a, f"({job}) & echo now")
    assert answer.startswith("now\n") and answer.endswith("prints to nowhere]")
    (tmp_path / "go").touch()
    assert until((tmp_path / "printed").exists)  # nobody closed its pipe


def test_a_full_pipe_with_no_writer_left_is_no_background_job(a):
    output, writer = new_output(a)
    os.write(writer, b"x" * agent.PIPE_SIZE)
    os.close(writer)
    output.drain(patience=0)
    assert not output.is_open and len(output.both_ends()) == agent.PIPE_SIZE


# ================================ Our own record, and the key ================================


def test_a_search_does_not_grow_by_our_own_record(serve, tmp_path):
    (tmp_path / "notes.txt").write_text("a WALRUS here\n")
    search = "grep -rn WALRUS ."
    api = serve([batch(search), batch(search), batch("grep -rl WALRUS .transcripts"), "Done."])
    make_agent(api, tmp_path).run("Look for WALRUS.")
    first, second, record = answers(api)
    assert first == second == "./notes.txt:1:a WALRUS here\n[exit status 0]"
    assert record.startswith(".transcripts/")  # the command names it


def test_a_very_long_line_of_our_own_record_is_left_out_whole(serve, tmp_path):
    (tmp_path / "notes.txt").write_text("a WALRUS here\n")
    api = serve([batch("grep -rn WALRUS ."), "Done."])
    make_agent(api, tmp_path).run("Look for this: " + "WALRUS " * 30_000)
    assert answers(api) == ["./notes.txt:1:a WALRUS here\n[exit status 0]"]


def test_a_line_of_our_own_record_is_left_out_whole_however_it_arrives(a, tmp_path):
    """Longer than what is held back until a line has ended."""
    (tmp_path / "line").write_bytes(b"./.transcripts/x: " + b"WALRUS " * 300_000 + b"\n")
    assert bash(a, "cat line; echo end") == "end\n[exit status 0]"
    assert kept(tmp_path) == []


def test_other_lines_with_the_name_of_our_record_are_none_of_it(a, tmp_path):
    lines = "other/pkg/.transcripts/notes.md\nhttps://e.x/.transcripts/y\n"
    (tmp_path / "lines").write_text(lines)
    assert bash(a, "cat lines") == lines + "[exit status 0]"


def test_a_command_that_names_our_record_gets_every_byte_of_it(a, tmp_path):
    bash(a, "printf '.transcripts/%0200000d\\nend\\n' 7")
    [file] = kept(tmp_path)
    assert file.read_bytes() == b".transcripts/" + b"0" * 199_999 + b"7\nend\n"


def test_a_search_by_absolute_path_does_not_grow_by_our_own_record(serve, tmp_path):
    (tmp_path / "notes.txt").write_text("a WALRUS here\n")
    api = serve([batch(f"grep -rn WALRUS '{tmp_path}'"), "Done."])
    make_agent(api, tmp_path).run("Look for WALRUS.")
    assert answers(api) == [f"{tmp_path}/notes.txt:1:a WALRUS here\n[exit status 0]"]


HIDDEN = [
    "seq 1 200000; cat key; seq 1 200000",  # in the middle of megabytes
    r"printf '\033]0;%s\007 title\n%300s\n' $(cat key) .",  # in an escape code
    r"printf '%s\rover it\n%300s\n' $(cat key) .",  # before a bare carriage return
    r"printf 'sk-te'; sleep 0.2; printf '%s' $(cut -c6- key); printf '%300s' .",  # in two writes
    "yes $(cat key) | head -20000 | tr -d '\\n'",  # in one long line
]


@pytest.mark.parametrize("command", HIDDEN)
def test_the_key_in_an_output_is_masked_before_it_is_written(serve, tmp_path, command):
    (tmp_path / "key").write_text(KEY + "\n")
    api = serve([batch(command), "Done."])
    a = make_agent(api, tmp_path)
    a.run("Go.")
    written = all_bytes(tmp_path)
    assert b"[key removed]" in written and b"[exit status 0]" in written
    assert KEY[:12].encode() not in written and KEY[-8:].encode() not in written
    assert KEY not in said(a) + texts(api.requests[-1].messages)


def test_the_live_line_shows_the_newest_output_without_the_key(a):
    output, writer = new_output(a)
    assert output.last_line() == "running"
    for printed, shown in {
        b"one\ntwo\n": "two",
        b"\x1b[31mthe key is " + KEY.encode(): "the key is [key removed]",
    }.items():
        os.write(writer, printed)
        assert output.take() and output.last_line() == shown
    os.close(writer)


# ================================ Interrupts and ends ================================


def test_ctrl_c_ends_a_command_and_the_conversation_goes_on(serve, tmp_path, marks):
    command = f"echo begun; touch started; {marks[0]}; touch late"
    api = serve([batch(command, "touch never"), "Here."])
    a = make_agent(api, tmp_path)
    signal_when(tmp_path / "started")
    with pytest.raises(KeyboardInterrupt):
        a.run("Run it.")
    assert gone(marks[0])
    assert a.run("And now?") == "Here."
    first, second = answers(api)
    assert first == f"begun\n{INTERRUPTED}" and second.startswith("Not run")
    last = api.requests[-1].messages[-1]["content"]
    assert [block["type"] for block in last] == ["tool_result", "tool_result", "text", "text"]
    assert [block["text"] for block in last[2:]] == ["[The user stopped you here.]", "And now?"]
    assert not (tmp_path / "late").exists() and not (tmp_path / "never").exists()


def test_ctrl_c_ends_a_command_that_pours_output_and_keeps_what_came(serve, tmp_path, marks):
    mark = marks[0].replace("sleep", "yes")
    api = serve([batch(f"seq 1 100000; touch started; {mark}"), "Here."])
    a = make_agent(api, tmp_path)
    signal_when(tmp_path / "started")
    with pytest.raises(KeyboardInterrupt):
        a.run("Run it.")
    assert gone(mark) and a.run("And now?") == "Here."
    [answer] = answers(api)
    assert answer.startswith("1\n2\n3\n") and answer.endswith(f"\n{INTERRUPTED}")


def test_ctrl_c_while_a_command_is_being_started_leaves_nothing_that_runs(serve, tmp_path, marks):
    api = serve([batch(marks[0]), "Here."])
    a = make_agent(api, tmp_path)
    with pytest.raises(KeyboardInterrupt), interrupted_at("_execute_child", event="return"):
        a.run("Run it.")
    assert gone(marks[0]) and a.run("And now?") == "Here."
    assert answers(api) == [f"(no output)\n{INTERRUPTED}"]


def test_ctrl_c_leaves_nothing_that_runs_in_a_program_that_has_not_installed_the_handlers(
    serve, tmp_path, marks
):
    api = serve([batch(marks[0]), "Here."])
    a = make_agent(api, tmp_path)
    with disposition(signal.SIGINT, signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt), interrupted_at("_execute_child", event="return"):
            a.run("Run it.")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert gone(marks[0]) and a.run("And now?") == "Here."
    assert answers(api) == [f"(no output)\n{INTERRUPTED}"]


def test_ctrl_c_leaves_nothing_that_runs_of_a_tool_of_ones_own(serve, tmp_path, marks, monkeypatch):
    def check(a: agent.Agent, what: str) -> str:
        """Check it."""
        return agent.bash(a, what)

    monkeypatch.setitem(agent.TOOLS, "check", agent.Tool(check, "what"))
    api = serve([Reply(call("check", {"what": marks[0]})), "Here."])
    a = make_agent(api, tmp_path)
    with pytest.raises(KeyboardInterrupt), interrupted_at("_execute_child", event="return"):
        a.run("Check it.")
    assert gone(marks[0]) and a.run("And now?") == "Here."


@pytest.mark.parametrize("second", ["kill_session", "drain", "readable", "add_result"])
def test_a_second_ctrl_c_takes_nothing_from_what_the_first_one_left(serve, tmp_path, marks, second):
    api = serve([batch(f"echo begun; touch started; {marks[0]}"), "Here."])
    a = make_agent(api, tmp_path)
    signal_when(tmp_path / "started")
    with pytest.raises(KeyboardInterrupt), interrupted_at(second):
        a.run("Run it.")
    assert gone(marks[0])
    assert a.run("And now?") == "Here."
    assert answers(api) == [f"begun\n{INTERRUPTED}"]


@pytest.mark.parametrize("moment", ["both_ends", "drain", "readable", "fill", "add_result"])
def test_ctrl_c_after_the_end_of_a_command_leaves_its_result_as_it_ended(serve, tmp_path, moment):
    api = serve([batch("seq 1 200; exit 3", "touch never"), "Here."])
    a = make_agent(api, tmp_path)
    with pytest.raises(KeyboardInterrupt), interrupted_at(moment):
        a.run("Run it.")
    assert a.run("And now?") == "Here."
    done, never = answers(api)
    assert done.startswith("1\n2\n3\n") and done.endswith("\n200\n[exit status 3]")
    assert never.startswith("Not run") and not (tmp_path / "never").exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_a_signal_that_ends_the_agent_ends_the_command_and_keeps_what_was_printed(
    serve, tmp_path, marks, name
):
    number = getattr(signal, name)
    job, group, shell, _ = marks
    api = serve([batch(f"echo begun; touch started; {job} & set -m; {group} & {shell}")])
    with disposition(number, signal.SIG_DFL):
        a = make_agent(api, tmp_path)
        signal_when(tmp_path / "started", number)
        with pytest.raises(SystemExit) as end:
            a.run("Run it.")
    assert end.value.code == 128 + number
    assert [mark for mark in marks if not gone(mark)] == []
    [result] = results(a.messages)
    assert result["content"].startswith("begun\n[") and "Not run" not in result["content"]
    assert json.dumps(result["content"]).encode() in all_bytes(tmp_path)


def test_under_nohup_a_hangup_ends_neither_the_agent_nor_the_command(serve, tmp_path):
    command = "touch started; until [ -e go ]; do sleep 0.05; done; echo finished"
    api = serve([batch(command), "All done."])

    def hang_up() -> None:
        if until((tmp_path / "started").exists):
            os.kill(os.getpid(), signal.SIGHUP)
        (tmp_path / "go").touch()

    with disposition(signal.SIGHUP, signal.SIG_IGN):
        a = make_agent(api, tmp_path)
        threading.Thread(target=hang_up, daemon=True).start()
        assert a.run("Run it.") == "All done."
    assert answers(api) == ["finished\n[exit status 0]"]


def test_a_working_directory_that_is_gone_is_said_plainly(serve, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a").touch()
    api = serve([batch('rm -r "$PWD"; echo removed'), batch("echo never"), "It is gone.", "Yes."])
    a = make_agent(api, folder)
    assert a.run("Clean up.") == "It is gone."
    first, second = results(api.requests[-1].messages)
    assert first["content"] == "removed\n[exit status 0]"
    assert second["is_error"]
    assert second["content"] == f"Error: the working directory {folder} is gone"
    assert a.run("Are you there?") == "Yes."
