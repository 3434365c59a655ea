"""The bash tool, case by case: rows 3-1 to 3-14 of the public bug reports. Each test is named by what holds."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import anthropic  # noqa: F401 - so that no clock below counts the import
import pyte
import pytest
from harness import PROMPT, agent, ask, command, environment, processes, results, run, said, session, terminal
from messages_api import Reply, call

GIT = "git -c user.name=t -c user.email=t@example.invalid"
WAITING = [
    "cat",
    "read x; echo got=$x",
    "python3",
    f"git init -q repo; cd repo; touch staged; git add staged; {GIT} commit",
    "ssh -o StrictHostKeyChecking=ask -o ConnectTimeout=5 127.0.0.1",
    "sudo -k; sudo true",
    "less file",
    "echo asked >/dev/tty",
]


def batch(*commands, **arguments):
    """One reply that calls bash once for each command."""
    return Reply(*[call("bash", {"command": each, **arguments}) for each in commands])


def outputs(serve, cwd, *commands, **arguments):
    """The results of the commands, run in one batch of the real loop; none of them may be an error."""
    api = serve([batch(*commands, **arguments), "All ran."])
    assert ask(session(api, cwd), "Run them.") == "All ran."
    answers = results(api.requests[-1].messages)
    assert len(answers) == len(commands)
    assert not [answer for answer in answers if answer.get("is_error")]
    return [answer["content"] for answer in answers]


def gone(mark, seconds=5):
    """No process with this mark is left, at the latest after a few seconds."""
    end = time.monotonic() + seconds
    while processes(mark) and time.monotonic() < end:
        time.sleep(0.05)
    return not processes(mark)


@pytest.fixture
def marks():
    """Marks of processes that are to be ended after the test, whatever became of it."""
    listed = []
    yield listed
    for pid in [pid for mark in listed for pid in processes(mark)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def nothing_waited(answers, folder):
    cat, read, python, git, ssh, sudo, less, tty = answers
    assert not [answer for answer in answers if "timed out" in answer]
    assert "got=\n" in read
    assert "exit status 0" in cat and "exit status 0" in python and "exit status 0" in less
    assert "first line" in less and "last line" in less
    assert "exit status 0" not in git
    assert not list((folder / "repo/.git/refs/heads").iterdir())  # no commit without a message
    assert "exit status" in ssh and "exit status" in sudo
    assert "/dev/tty" in tty and "exit status 1" in tty  # there is no terminal to ask on


def waiting_folder(path):
    (path / "file").write_text("first line\n" + "line\n" * 200 + "last line\n")
    return {"EDITOR": "", "VISUAL": "", "GIT_EDITOR": "", "HOME": str(path), "GIT_CONFIG_NOSYSTEM": "1",
            "SSH_ASKPASS": "", "DISPLAY": ""}


def test_a_command_that_waits_for_input_gets_its_end_when_run_from_a_pipe(serve, tmp_path):
    """Case 3-1, stdin a pipe."""
    api = serve([batch(*WAITING), "All came back."])
    env = waiting_folder(tmp_path)
    start = time.monotonic()
    done = run(api, tmp_path, "-y", "-p", "Run them.", **env)
    assert time.monotonic() - start < 40
    assert (done.returncode, done.stdout) == (0, "All came back.\n")
    nothing_waited([answer["content"] for answer in results(api.requests[-1].messages)], tmp_path)
    assert len(api.requests) == 2


def test_a_command_that_waits_for_input_never_takes_the_users_terminal(serve, tmp_path):
    """Case 3-1, on a pseudo-terminal: no password prompt, no editor, no question from a command on it."""
    api = serve([batch(*WAITING), "All came back.", "Still here."])
    child = terminal(api, tmp_path, "-y", NO_COLOR="1", **waiting_folder(tmp_path))
    child.logfile_read = screen = io.StringIO()
    child.sendline("Run them.")
    child.expect_exact("All came back.", timeout=40)
    child.expect_exact(PROMPT)
    nothing_waited([answer["content"] for answer in results(api.requests[1].messages)], tmp_path)
    assert not re.search(r"(?im)^(\[sudo\]|.*password( for \S+)?: *$|asked)", screen.getvalue())
    child.sendline("And now?")
    child.expect_exact("Still here.")
    child.close()
    assert len(api.requests) == 3


def test_a_background_job_never_holds_the_call_and_lives_on_as_the_description_says(serve, tmp_path, marks):
    """Case 3-3."""
    marks += ["sleep 321001", "sleep 322001", f"http.server 0 --bind 127.0.0.1 --directory {tmp_path}", "sleep 323001"]
    commands = ["sleep 321001 & echo started", "(setsid sleep 322001 &) ; echo started2",
                f"python3 -m {marks[2]} & sleep 1; echo up", "nohup sleep 323001 >/dev/null 2>&1 & echo ok"]
    api = serve([batch(*commands), batch("echo next"), "Done."])
    start = time.monotonic()
    assert ask(session(api, tmp_path), "Start them.") == "Done."
    assert time.monotonic() - start < 20
    answers = [answer["content"] for answer in results(api.requests[-1].messages)]
    for answer, word in zip(answers, ["started", "started2", "up", "ok", "next"], strict=True):
        assert word in answer.split() and "exit status 0" in answer
    assert [len(processes(mark)) >= 1 for mark in marks] == [True] * 4
    bash = next(tool for tool in api.requests[0].body["tools"] if tool["name"] == "bash")
    assert re.search(r"(?i)background.*\blive on\b", bash["description"])


def test_a_background_job_outlives_the_agent(serve, tmp_path, marks):
    """Case 3-3: what the description says is true after the end of the program, too."""
    marks.append("sleep 324001")
    api = serve([batch("sleep 324001 & echo started"), "Started."])
    done = run(api, tmp_path, "-y", "-p", "Start it.")
    assert done.stdout == "Started.\n"
    assert len(processes("sleep 324001")) == 1


def test_a_timeout_kills_everything_the_command_started(serve, tmp_path, marks):
    """Case 3-4."""
    marks += ["sleep 777101", "sleep 777201"]
    api = serve([batch("echo early; (trap '' TERM; exec sleep 777101) & sleep 777201", timeout=1), "Too slow.", "Here."])
    s = session(api, tmp_path)
    start = time.monotonic()
    assert ask(s, "Run it.") == "Too slow."
    assert time.monotonic() - start < 1 + 9
    [answer] = results(api.requests[-1].messages)
    assert answer["content"].startswith("early\n")
    assert re.search(r"timed out.*\b1 s", answer["content"])
    assert gone("sleep 777101") and gone("sleep 777201")
    assert ask(s, "And now?") == "Here."


def test_a_timeout_reaches_process_groups_that_the_command_made(serve, tmp_path, marks):
    """Case 3-4: with job control each job is a process group of its own; `timeout` makes one as well."""
    marks += ["sleep 777301", "sleep 777401"]
    [answer] = outputs(serve, tmp_path, "set -m; sleep 777301 & timeout 99 sleep 777401", timeout=1)
    assert "timed out" in answer
    assert gone("sleep 777301") and gone("sleep 777401")


def test_the_time_limit_of_the_settings_holds_for_a_call_that_names_none(serve, tmp_path, marks):
    """Case 3-4: AGENT_BASH_TIMEOUT; a call may ask for more."""
    marks.append("sleep 777501")
    api = serve([Reply(call("bash", {"command": "echo early; sleep 777501"}),
                       call("bash", {"command": "sleep 2; echo late", "timeout": 60})), "Done."])
    assert ask(session(api, tmp_path, bash_timeout=1), "Run it.") == "Done."
    first, second = [answer["content"] for answer in results(api.requests[-1].messages)]
    assert first.startswith("early\n") and re.search(r"timed out.*\b1 s", first)
    assert second.startswith("late\n") and "exit status 0" in second
    assert gone("sleep 777501")


def test_endless_output_neither_fills_memory_nor_the_result(serve, tmp_path):
    """Case 3-5. The agent itself starts with some 60 MB."""
    api = serve([batch("yes", "head -c 3000000000 /dev/zero", "seq 1 3000000; echo ENDMARK"), "Done."])
    args = command("-y", "-p", "Run them.")
    process = subprocess.Popen(args, cwd=tmp_path, env=environment(api), stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    sizes = sorted(file.stat().st_size for file in (tmp_path / ".transcripts").glob("*/*.txt"))
    shutil.rmtree(tmp_path / ".transcripts")  # hundreds of megabytes
    assert process.returncode == 0
    assert usage.ru_maxrss < 360_000  # kilobytes
    yes, zeros, seq = [answer["content"] for answer in results(api.requests[-1].messages)]
    assert max(map(len, (yes, zeros, seq))) <= 24_000
    for killed in (yes, zeros):
        assert re.search(r"killed.*\b200(,000,000| MB)", killed)
    assert yes.startswith("y\ny\ny\n")
    assert seq.startswith("1\n2\n3\n") and "\n3000000\nENDMARK\n" in seq and "exit status 0" in seq
    total = 22_888_896 + len("ENDMARK\n")
    assert total in sizes and ".transcripts/" in seq  # the whole is kept, and the note says where


def test_the_time_limit_holds_while_output_pours(serve, tmp_path, marks):
    """Case 3-5: the limit still works when the command never stops writing."""
    marks.append("777601")
    [answer] = outputs(serve, tmp_path, "while :; do echo line 777601; done", timeout=1)
    assert answer.startswith("line 777601\n") and re.search(r"timed out.*\b1 s", answer)
    assert len(answer) <= 24_000
    assert gone("777601")


def test_ctrl_c_ends_a_command_with_much_output_at_once_and_keeps_what_came(serve, tmp_path, marks):
    """Case 3-5: no stall of Ctrl-C."""
    marks.append("sleep 888101")
    api = serve([batch("yes 'long line' | head -c 50000000; touch began; sleep 888101"), "Here."])
    child = terminal(api, tmp_path, "-y", NO_COLOR="1")
    child.sendline("Run it.")
    end = time.monotonic() + 20
    while not (tmp_path / "began").exists() and time.monotonic() < end:
        time.sleep(0.05)
    child.sendintr()
    start = time.monotonic()
    child.expect_exact(PROMPT)
    assert time.monotonic() - start < 6
    assert gone("sleep 888101")
    child.sendline("And now?")
    child.expect_exact("Here.")
    child.close()
    shutil.rmtree(tmp_path / ".transcripts")  # 50 megabytes
    [answer] = results(api.requests[-1].messages)
    assert answer["content"].startswith("long line\nlong line\n") and "interrupted" in answer["content"]
    assert len(answer["content"]) <= 24_000


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\6\0\0\0\x1f\x15\xc4\x89\xff\xfe\0\0IEND\xaeB`\x82"
BYTES = [r"printf 'A\377\376B\n'", "head -c 4096 /dev/urandom", "cat photo.png",
         "printf a; for i in {1..20000}; do printf '\\342\\202\\254'; done", "echo after"]


def bytes_came_through(answers):
    odd, noise, png, euros, after = answers
    assert odd.startswith("A\ufffd\ufffdB\n")
    assert "\ufffd" in noise and "exit status 0" in noise
    assert "PNG" in png and "IEND" in png and "\0" not in png
    assert euros.startswith("a\u20ac\u20ac") and "\ufffd" not in euros
    assert after.startswith("after\n")


def test_output_that_is_not_utf8_arrives_with_replacement_marks(serve, tmp_path):
    """Case 3-6. A result of this session is cut at 1,600 characters or a little more: euro signs are cut, too."""
    (tmp_path / "photo.png").write_bytes(PNG)
    api = serve([batch(*BYTES), "Done."])
    assert ask(session(api, tmp_path, threshold=10_000), "Run them.") == "Done."
    answers = [answer["content"] for answer in results(api.requests[-1].messages)]
    bytes_came_through(answers)
    assert len(answers[3]) <= 8_000 and answers[3].count("\u20ac") < 8_000


def test_a_character_is_never_cut_in_two_in_output_of_many_megabytes(serve, tmp_path):
    """Case 3-6: 15 MB of three-byte characters, at each of three offsets."""
    program = "import sys; sys.stdout.write('{}' + '\\u20ac' * 5000000)"
    commands = [f'PYTHONUTF8=1 python3 -c "{program.format(lead)}"' for lead in ("", "a", "ab")]
    for answer in outputs(serve, tmp_path, *commands):
        assert answer.count("\u20ac") > 5_000 and "\ufffd" not in answer
    shutil.rmtree(tmp_path / ".transcripts")


def test_output_that_is_not_utf8_is_no_trouble_in_a_c_locale(serve, tmp_path):
    """Case 3-6, with LC_ALL=C and a screen that takes ASCII only."""
    (tmp_path / "photo.png").write_bytes(PNG)
    api = serve([batch(*BYTES), "Fin\u00e9 \u20ac.", "More."])
    done = run(api, tmp_path, "-y", stdin="Run them.\nGo on.\n", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr
    assert "Fin" in done.stdout and "More." in done.stdout
    bytes_came_through([answer["content"] for answer in results(api.requests[1].messages)])
    assert len(api.requests) == 3


def test_a_failure_shows_both_streams_in_order_and_how_it_ended(serve, tmp_path):
    """Case 3-7. A command that ran and failed is no error of the tool (`outputs` asserts that)."""
    failed, killed, late = outputs(serve, tmp_path, "echo out; echo err >&2; exit 7", "kill -9 $$",
                                   "seq 1 200000; echo LASTERR >&2; exit 2")
    assert failed.startswith("out\nerr\n") and re.search(r"exit status 7\b", failed)
    assert re.search(r"SIGKILL|signal 9\b|\b137\b", killed)
    assert late.startswith("1\n2\n") and "\n200000\nLASTERR\n" in late
    assert re.search(r"exit status 2\b", late.rpartition("LASTERR")[2])


def test_silence_success_and_failure_can_be_told_apart(serve, tmp_path):
    """Case 3-7, with no output at all: three texts, none of them empty."""
    true, false, three = outputs(serve, tmp_path, "true", "false", "exit 3")
    assert "exit status 0" in true and "exit status 1" in false and "exit status 3" in three
    assert len({true, false, three}) == 3


def test_no_word_in_a_command_keeps_it_from_running(serve, tmp_path):
    """Case 3-8: once allowed, every command runs as it stands."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/install.txt").write_text("use sudo here\n")
    (tmp_path / "build/deep").mkdir(parents=True)
    text = "".join(f"line {i}: rm -rf / && :(){{ :|:& }};: > /dev/sda\n" for i in range(45))
    assert len(text) > 2000
    listed, null, found, commit, removed, shutdown, here = outputs(
        serve, tmp_path, "ls -d docs 2>/dev/null", "echo x > /dev/null", "grep -r sudo docs",
        f"git init -q . && {GIT} commit -q --allow-empty -m 'fix reboot loop' && git log --format=%s", "rm -rf ./build",
        "echo shutdown complete", f"cat > script.txt <<'END'\n{text}END")
    assert listed.startswith("docs\n") and found.startswith("docs/install.txt:use sudo here\n")
    assert commit.startswith("fix reboot loop\n") and shutdown.startswith("shutdown complete\n")
    assert all("exit status 0" in answer for answer in (null, removed, here))
    assert not (tmp_path / "build").exists()
    assert (tmp_path / "script.txt").read_text() == text


COLOURS = r"printf '\033[31mred\033[0m \033[1;38;5;200mpink\033[m\033[2J\033[10;10H\033[?25l\033]0;STOLEN\007end\n'"
PROGRESS = r"for i in {1..500}; do printf '\r%d%% [#####.....] working' $((i / 5)); done; printf '\r\033[K100%% done\n'"


def test_escape_codes_and_progress_never_reach_the_model(serve, tmp_path):
    """Case 3-9."""
    (tmp_path / "dos.txt").write_bytes(b"".join(b"line %d\r\n" % i for i in range(50)))
    colours, progress, dos = outputs(serve, tmp_path, COLOURS, PROGRESS, "cat dos.txt")
    assert colours.startswith("red pinkend\n") and "\x1b" not in colours
    assert progress.startswith("100% done\n") and len(progress) < 1000 and "\r" not in progress
    assert dos.startswith("".join(f"line {i}\n" for i in range(50))) and "\r" not in dos


def test_a_progress_line_without_an_end_keeps_its_last_state(serve, tmp_path):
    """Case 3-9: the end state is kept whether the line ends in a return or in nothing."""
    answers = outputs(serve, tmp_path, r"printf '1%%\r50%%\r99%%'", r"printf '1%%\r50%%\r99%%\r'",
                      r"printf 'one\r\ntwo\r\r\nthree\n'")
    assert [answer.rpartition("\n")[0] for answer in answers] == ["99%", "99%", "one\ntwo\nthree"]


def test_megabytes_of_progress_or_broken_escape_codes_are_cleaned_in_linear_time(serve, tmp_path):
    """Case 3-9: 3 MB each, of the kinds that make a careless pattern take minutes."""
    kinds = [r"'\r50%' * 750000", r"'\x1b[' * 1500000", r"'\x1b[' + '0' * 3000000", r"'\x1b]' + 'x' * 3000000",
             r"'\x1b' * 3000000", r"('\x1b]' + 'x' * 9) * 270000", r"'\x1b ' + ' ' * 3000000"]
    start = time.monotonic()
    answers = outputs(serve, tmp_path, *[f'python3 -c "print({kind} + chr(10) + chr(69) * 3)"' for kind in kinds])
    assert time.monotonic() - start < 30
    assert [answer for answer in answers if "\x1b" in answer] == []
    assert answers[0].startswith("50%\nEEE\n")
    assert all("EEE\n" in answer for answer in answers[:3])


def test_what_a_command_prints_never_steers_the_users_terminal(serve, tmp_path):
    """Case 3-9: after it the cursor is visible, the title unchanged and the screen not cleared."""
    api = serve([batch(COLOURS, PROGRESS), "All printed."])
    child = terminal(api, tmp_path, "-y", NO_COLOR="1")
    child.logfile_read = raw = io.StringIO()
    child.sendline("Print them.")
    child.expect_exact("All printed.")
    child.expect_exact(PROMPT)
    child.close()
    screen = pyte.Screen(100, 40)
    pyte.Stream(screen).feed(raw.getvalue())
    shown = "\n".join(screen.display)
    assert not screen.cursor.hidden and screen.title == ""
    assert "\x1b]" not in raw.getvalue() and "\x1b[2J" not in raw.getvalue() and "\x1b[?25l" not in raw.getvalue()
    assert "red pinkend" in shown and "100% done" in shown


def test_commands_do_not_inherit_the_key_but_all_the_rest(serve, tmp_path):
    """Case 3-11. (A command of the same user can read /proc/<parent>/environ: nothing here can stop that.)"""
    api = serve([batch("env", "python3 -c 'import os; print(dict(os.environ))'", "cat /proc/self/environ; echo"), "Done."])
    env = {"ANTHROPIC_API_KEY": "KEYSENTINEL", "ANTHROPIC_AUTH_TOKEN": "TOKENSENTINEL", "FOO": "foo is here",
           "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    done = run(api, tmp_path, "-y", "-p", "Show the environment.", **env)
    assert done.returncode == 0 and len(api.requests) == 2
    remembered = "".join(file.read_text(errors="replace") for file in (tmp_path / ".transcripts").rglob("*.*")
                         if file.is_file())
    assert "foo is here" in remembered
    bodies = json.dumps([request.body for request in api.requests])
    for place in (bodies, done.stdout, done.stderr, remembered):
        assert "SENTINEL" not in place
    for answer in results(api.requests[-1].messages):
        for passed in ("foo is here", str(tmp_path), "C.UTF-8", os.environ["PATH"]):
            assert passed in answer["content"]


def test_each_call_is_a_fresh_shell_in_the_start_folder_as_the_description_says(serve, tmp_path):
    """Case 3-12: in one reply and over three, for bash and for relative paths of the file tools."""
    calls = [call("bash", {"command": "mkdir -p sub; cd sub; export Q=1; pwd"}),
             call("bash", {"command": "pwd; echo q=$Q"}), call("write_file", {"path": "here.txt", "content": "here\n"})]
    for number, replies in enumerate([[Reply(*calls)], [Reply(each) for each in calls]]):
        folder = tmp_path / str(number)
        folder.mkdir()
        api = serve([*replies, "Done."])
        assert ask(session(api, folder), "Go.") == "Done."
        first, second, _ = [answer["content"] for answer in results(api.requests[-1].messages)]
        assert first.startswith(f"{folder}/sub\n")
        assert second.startswith(f"{folder}\nq=\n")
        assert (folder / "here.txt").read_text() == "here\n" and not (folder / "sub/here.txt").exists()
        bash = next(tool for tool in api.requests[0].body["tools"] if tool["name"] == "bash")
        assert re.search(r"(?i)\bcd\b.*not last", bash["description"])


def test_commands_run_in_bash(serve, tmp_path):
    """Case 3-14."""
    (tmp_path / "v.sh").write_text("V='the value'\n")
    pipe, match, source, braces = outputs(serve, tmp_path, "set -o pipefail; false | true; echo rc=$?",
                                          "[[ abc == a* ]] && echo yes", "source ./v.sh && echo $V", "echo {1..3}")
    assert pipe.startswith("rc=1\n") and match.startswith("yes\n")
    assert source.startswith("the value\n") and braces.startswith("1 2 3\n")


def test_bash_answers_when_called_as_a_function(serve, tmp_path):
    """Cases 3-7 and 3-14, through the table of handlers, as another program would call it."""
    s = session(serve(), tmp_path)
    answer = agent.TOOL_HANDLERS["bash"](s, command="echo {1..3}; exit 4")
    assert answer.startswith("1 2 3\n") and "exit status 4" in answer
    assert "Traceback" not in said(s)


def test_every_call_says_on_screen_what_runs(serve, tmp_path):
    """Case 3-7, for the person: the command line and a preview of its result."""
    api = serve([batch("echo out; echo err >&2; exit 7"), "Done."])
    s = session(api, tmp_path)
    ask(s, "Run it.")
    lines = said(s).splitlines()
    at = lines.index("> bash: echo out; echo err >&2; exit 7")
    assert [line.strip() for line in lines[at + 1 : at + 3]] == ["out", "err"] and "7" in lines[at + 3]


def test_leftovers_of_short_output_are_not_kept(serve, tmp_path):
    """Case 3-5, the other end: a short result leaves no file of its own, a long one does, and says where."""
    [short, long] = outputs(serve, tmp_path, "echo short", "seq 1 20000")
    [kept] = Path(tmp_path / ".transcripts").glob("*/*.txt")
    assert str(kept.relative_to(tmp_path)) in long and ".transcripts" not in short
    assert kept.read_text() == "".join(f"{i}\n" for i in range(1, 20001))


def test_ctrl_c_while_a_command_is_being_started_leaves_nothing_that_runs(serve, tmp_path, monkeypatch):
    """The moment is made certain: the signal comes when the process is there, but Popen has not returned yet."""
    mark, start = "sleep 7654.321", subprocess.Popen._execute_child

    def interrupted(self, *args):
        start(self, *args)
        signal.raise_signal(signal.SIGINT)

    s = session(serve([Reply(call("bash", {"command": f"touch ran; {mark}"}))]), tmp_path)
    s.add("user", "go")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subprocess.Popen, "_execute_child", interrupted)
        agent.agent_loop(s)
    time.sleep(0.3)
    assert processes(mark) == [] and not (tmp_path / "ran").exists()
    assert ask(s, "and now?") == "ok"


def test_the_shell_takes_a_command_as_it_is_and_reads_its_start_up_file_once(serve, tmp_path, monkeypatch):
    (tmp_path / "startup").write_text("echo started\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "startup"))
    dash, zero = outputs(serve, tmp_path, "-x", "echo $0 $# $SHLVL; cat; echo 'a\nb' \"c\"")
    assert dash.count("started") == 1 and dash.endswith("-x: command not found\n[exit status 127]")
    assert re.fullmatch(r"started\n/bin/bash 0 \d+\na\nb c\n\[exit status 0\]", zero)
