"""The README holds: each of its blocks, commands, exercises and tables is tried here, and so is the tour.

    python tests/test_readme.py     prints the screen from which the picture in the README was taken
"""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import fields
from pathlib import Path

import demo
import pexpect
import pyte
import pytest
from harness import PROMPT, ROOT, agent, ask, environment, results, said, session, texts
from messages_api import MessagesAPI, Reply, call, is_summary

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", README)
PROSE = re.sub(r"(?ms)^```.*?^```$", "", README)

# What tries each block, by how it begins, and each command that stands in a sentence.
CLAIMED = {
    "agent >> ": "test_the_picture_is_a_real_screen",
    'python3 -m pip install -q "': "test_the_line_that_runs_it",
    "python3 -m pip install -q -r": "test_the_line_that_tests_it",
    "python3 tests/demo.py": "test_the_tour",
    "python3 agent.py ": "test_the_ways_to_start_it",
    "ls -t .transcripts": "test_a_forgotten_output_is_found_by_hand",
    "import agent\n": "test_the_module",
    "def run_append(": "test_the_tool",
    "def allow(": "test_the_permission_rule",
    "agent.SYSTEM = ": "test_the_prompt_and_the_model",
}
COMMANDS = {
    "uv run agent.py": "test_the_packages_are_named_alike_everywhere",
    "python3 agent.py": "test_the_line_that_runs_it",
    "python3 tests/demo.py": "test_the_tour",
    "python3 tests/bench.py": "test_the_bench_takes_a_path",
    "python3 tests/bench.py PATH": "test_the_bench_takes_a_path",
    "git checkout agent.py tests/demo.py": "test_an_exercise_is_taken_back",
    "kill -9": "(a test of the transcript)",
    "python -q": "(what Python itself takes)",
}


def block(start):
    found = [body for _, body in BLOCKS if body.startswith(start)]
    assert len(found) == 1
    return found[0]


def table(head):
    """The rows of the table whose first line begins like this, as lists of cells."""
    lines = PROSE[PROSE.index("\n| " + head) + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def commands(body):
    return [line.split(" #")[0].strip() for line in body.splitlines()]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def shell(line, cwd, api=None, stdin="", **env):
    """A line of the README in Bash, where `python3` is the Python of the tests."""
    folder = Path(tempfile.mkdtemp())
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python3").chmod(0o755)
    env["PATH"] = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", line], cwd=cwd, env=environment(api, **env), input=stdin, text=True,
                          capture_output=True, timeout=100)
    shutil.rmtree(folder)
    return done


def copy(folder):
    """What the agent and the tour need, where it can be changed."""
    (folder / "tests").mkdir()
    for name in ("agent.py", "tests/demo.py", "tests/messages_api.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def change(folder, name, old, new):
    text = (folder / name).read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {name}"
    (folder / name).write_text(text.replace(old, new))


def one_line(text):
    return " ".join(text.split())


# ------------------------------------------ Nothing is left untried ------------------------------------------

def test_every_block_is_tried_by_a_test():
    begun = [[start for start in CLAIMED if body.startswith(start)] for _, body in BLOCKS]
    assert [len(starts) for starts in begun] == [1] * len(BLOCKS)
    assert sorted(starts[0] for starts in begun) == sorted(CLAIMED)
    assert all(name in globals() for name in CLAIMED.values())


def test_every_command_in_a_sentence_is_tried_by_a_test():
    found = {span for span in code(PROSE) if re.match(r"(python3?|uv|git|cat|ls|grep|kill|pip) ", span)}
    assert found == set(COMMANDS)
    assert all(name in globals() for name in COMMANDS.values() if name.startswith("test_"))


# ------------------------------------------------- The tour --------------------------------------------------

@pytest.mark.parametrize("line", commands(block("python3 tests/demo.py")))
def test_the_tour(line):
    """In a pipe, where the input has ended: --step waits for nobody and breaks nothing."""
    done = shell(line, ROOT)
    assert (done.returncode, done.stderr, "\x1b" in done.stdout) == (0, "", False)
    assert done.stdout.count("(Enter)") == 10 * ("--step" in line)
    assert max(map(len, done.stdout.splitlines())) <= 80
    parts = re.split(r"(?m)^Step (\d+) of 11\. (.*)\n", done.stdout)
    assert parts[1::3] == [str(number) for number in range(1, 12)]
    assert parts[2::3] == [title for _, title in demo.STEPS]
    for number, layer in ((4, "micro"), (6, "auto"), (9, "auto")):
        bars = r" tokens; [^]]*\]\n +before \[(#+)\.*\] \1 of 3,000 tokens\n +after  \[(#+)\.*\] \2 of 3,000 tokens\n"
        found = re.search(rf"\[{layer}_compact: ([\d,]+) -> ([\d,]+)" + bars, parts[3 * number])
        assert found and len(found[3]) > len(found[4])
    assert "[Previous: used bash: python3 test_stats.py." in parts[12]
    assert demo.SUMMARY.splitlines()[0] in parts[18] and demo.TASK in one_line(parts[18])
    assert "ALL PASS" in parts[24] and "Fixed: median()" in parts[30]
    address = re.search(r"\$ cat (\S+)", parts[33])[1]
    assert f"    {address} " in parts[33] and "FAILED" in parts[33].split("$ cat")[1]
    assert "10 requests, 0 of them invalid." in parts[33]
    for *_, shown in table("section | change"):   # what an exercise shows is not to be seen without it
        for no, words in re.findall(r"(no )?`([^`]+)`", shown):
            assert (words in one_line(done.stdout)) == bool(no)


def test_the_tour_waits_for_enter_on_a_terminal():
    child = pexpect.spawn(sys.executable, [str(ROOT / "tests/demo.py"), "--step"], env=environment(None), encoding="utf-8",
                          timeout=30, dimensions=(40, 80))
    log = child.logfile_read = io.StringIO()
    for number in range(1, 11):
        child.expect_exact("(Enter) ")
        if number == 4:
            time.sleep(1)
            assert child.expect_exact(["Step 5", pexpect.TIMEOUT], timeout=0) == 1
        child.sendline()
    child.expect_exact("0 of them invalid.")
    child.expect(pexpect.EOF)
    assert re.findall(r"Step (\d+) of 11", log.getvalue()) == [str(number) for number in range(1, 12)]
    assert "\x1b" not in log.getvalue() and max(map(len, log.getvalue().splitlines())) <= 80


def test_the_titles_do_not_depend_on_how_far_the_agent_is(tmp_path, capsys):
    """The tour is told from the lines of the agent alone; steps that never come are named."""
    tour = demo.Tour(tmp_path, None, waits=False)
    for line in ("[a line before]", "> bash: ls", "  a", "> read_file: stats.py", "> edit_file: stats.py"):
        tour.line(line)
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == ["    [a line before]", f"Step 1 of 11. {demo.STEPS[0][1]}", "    > bash: ls", "      a",
                     "Step 2 of 11 did not happen.", f"Step 3 of 11. {demo.STEPS[2][1]}", "    > read_file: stats.py",
                     "Step 4 of 11 did not happen.", "Step 5 of 11 did not happen.", "Step 6 of 11 did not happen.",
                     f"Step 7 of 11. {demo.STEPS[6][1]}", "    > edit_file: stats.py"]


# ------------------------------------------------ The picture ------------------------------------------------

def real_screen(folder):
    """What a person sees who gives the agent the task of the tour and says yes to all that it asks."""
    demo.make_project(folder)
    with MessagesAPI(demo.model()) as api:
        child = pexpect.spawn(sys.executable, [str(ROOT / "agent.py")], cwd=str(folder), encoding="utf-8", timeout=30,
                              env=environment(api, **demo.LIMITS), dimensions=(200, 130))
        log = child.logfile_read = io.StringIO()
        child.expect_exact(PROMPT)
        child.sendline(demo.TASK)
        while child.expect(["\\[a\\]lways \\w+: ", "from cache\\)"]) == 0:
            time.sleep(0.3)   # what is typed before the question is no answer
            child.sendline("y")
        child.expect_exact(PROMPT)
        child.sendeof()
        child.expect(pexpect.EOF)
        assert api.refused == []
    screen = pyte.Screen(130, 200)
    pyte.Stream(screen).feed(log.getvalue())
    return [line.rstrip() for line in screen.display if line.strip()]


def test_the_picture_is_a_real_screen(tmp_path):
    """Each line of the picture stands on a real screen, in that order; numbers, ids and left out lines apart."""
    def bare(line):
        return re.sub(r"\d+T\d+Z-\w+|\d[\d,.]*|\[#*\.*\]", "0", line)
    screen = iter([bare(line) for line in real_screen(tmp_path)])
    missing = [line for line in block("agent >> ").splitlines()
               if line != "[...]" and not any(seen.startswith(bare(line)) for seen in screen)]
    assert missing == []


# ---------------------------------------------- Starting it --------------------------------------------------

def test_the_packages_are_named_alike_everywhere():
    """In the file (for `uv run`), in the line that runs it, and in the list of the tests."""
    header = re.search(r"(?ms)^# /// script\n(.*?)^# ///$", (ROOT / "agent.py").read_text())[1]
    wanted = json.loads(re.search(r"dependencies = (\[.*\])", header)[1])
    assert wanted == (ROOT / "tests" / "requirements.txt").read_text().splitlines()[: len(wanted)]
    assert re.findall(r'"([^"]+)"', block('python3 -m pip install -q "')) == wanted
    assert re.search(r'requires-python = ">=3\.10"', header) and "Python 3.10 or newer" in README


def test_the_line_that_runs_it(serve, tmp_path):
    install, run_it = block('python3 -m pip install -q "').strip().split(" && ")
    shutil.copy(ROOT / "agent.py", tmp_path)
    assert run_it == "python3 agent.py" and install.startswith("python3 -m pip install -q ")
    done = shell(run_it, tmp_path, serve(["Hello, too."]), "hello\n")
    assert done.returncode == 0 and "Hello, too.\n" in done.stdout


def test_the_line_that_tests_it():
    install, test_it = block("python3 -m pip install -q -r").strip().split(" && ")
    assert (ROOT / install.split()[-1]).is_file() and (ROOT / test_it.split()[-1]).is_dir()
    marked = re.search(r"(?s)<!-- test -->\n```bash\n(.*?)\n```\n<!-- /test -->", README)
    assert marked and marked[1] == f"{install} && {test_it}"
    done = shell(f"{test_it} -n 0 --collect-only -p no:cacheprovider", ROOT)
    assert done.returncode == 0 and "tests/test_readme.py::test_the_line_that_tests_it" in done.stdout


def test_the_ways_to_start_it(serve, tmp_path):
    def script(request):
        if texts(request.messages[-1:]) == "run the tests":
            return Reply(call("bash", {"command": "echo RAN > ran.txt"}))
        return f"Answer {len(api.requests)}"

    api = serve(script)
    shutil.copy(ROOT / "agent.py", tmp_path)
    (tmp_path / "task.txt").write_text("a task from a file\n")
    shell("git init -q; git add task.txt; echo 'a changed line' >> task.txt", tmp_path)
    talk, go_on, *tasks = commands(block("python3 agent.py "))
    assert "Answer 1\n" in shell(talk, tmp_path, api, "hello\n").stdout
    assert "Answer 2\n" in shell(go_on, tmp_path, api, "and more\n").stdout
    assert all(word in texts(api.requests[1].messages) for word in ("hello", "and more"))
    done = [shell(line, tmp_path, api) for line in tasks]
    assert [(run.returncode, run.stdout) for run in done] == [(0, f"Answer {n}\n") for n in (3, 5, 6, 7)]
    sent = [texts(request.messages) for request in api.requests]
    assert sent[2] == "fix the failing test" and (tmp_path / "ran.txt").read_text() == "RAN\n"
    assert sent[5].startswith("[Standard input]\ndiff --git") and sent[5].endswith("review this")
    assert "a changed line" in sent[5] and sent[6] == "a task from a file\na changed line\n"


@pytest.mark.parametrize("name,cell", table("server | variables"), ids=lambda cell: cell.split(" ")[0])
def test_a_local_server_needs_no_key(serve, tmp_path, monkeypatch, name, cell):
    api = serve()
    for variable in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    values = dict(pair.split("=") for pair in code(cell)[0].split())
    assert re.fullmatch(r"http://localhost:\d+", values["ANTHROPIC_BASE_URL"]) and set(values) == {
        "ANTHROPIC_BASE_URL", "MODEL_ID"}
    for variable, value in values.items():
        monkeypatch.setenv(variable, api.url if "URL" in variable else value)
    if name == "Ollama":   # one of them as it stands there, the others in this process
        shutil.copy(ROOT / "agent.py", tmp_path)
        line = code(cell)[0].replace(values["ANTHROPIC_BASE_URL"], api.url) + " python3 agent.py -p hello"
        assert shell(line, tmp_path).stdout == "ok\n"
    monkeypatch.setattr(agent, "__file__", str(tmp_path / "agent.py"))   # no .env beside it
    assert ask(agent.Session(agent.read_settings(), cwd=tmp_path), "hello") == "ok"
    assert {request.body["model"] for request in api.requests} == {values["MODEL_ID"]}


def test_every_setting_stands_in_the_readme_and_in_the_example():
    names = {"api_key": "ANTHROPIC_API_KEY", "auth_token": "ANTHROPIC_AUTH_TOKEN", "base_url": "ANTHROPIC_BASE_URL",
             "model": "MODEL_ID"}
    example = dict(re.findall(r"(?m)^# ([A-Z_]+)=(\S*)", (ROOT / ".env.example").read_text()))
    readme = {code(row[0])[0]: row[1].strip("`") for row in table("variable | default")}
    wanted = {}
    for setting in fields(agent.Settings):
        name = names.get(setting.name, "AGENT_" + setting.name.upper())
        wanted[name] = "20000" if setting.name == "clear_at_least" else str(setting.default)
    assert example == wanted and readme == wanted


def test_every_command_of_the_prompt_stands_in_the_readme():
    readme = {name.split()[0] for row in table("command | what") for name in code(row[0])}
    assert readme == set(re.findall(r"(?m)^(/\w+)", agent.HELP)) | {"/help"}


def test_the_bench_takes_a_path():
    assert "[PATH ...]" in shell("python3 tests/bench.py --help", ROOT).stdout


# --------------------------------------------- How it forgets ------------------------------------------------

def test_the_long_test_log(serve, tmp_path):
    """The table in the README: from the moment it is printed to twenty turns later."""
    log = "python3 -c \"print('\\n'.join(f'{n:09}' for n in range(3000)))\""
    sizes = iter([log] + ["seq 1 1700"] * 20)
    api = serve(lambda request: Reply(call("bash", {"command": line})) if (line := next(sizes, "")) else "done")
    s = session(api, tmp_path)
    assert ask(s, "test") == "done"
    seen = [results(request.messages)[0]["content"] for request in api.requests[1:]]
    address = re.search(r"bytes left out; the whole is in (\S+) \.\.\.\]", seen[0])[1]
    assert re.fullmatch(r"\.transcripts/[^/]+/toolu_\w+\.txt", address)
    assert (tmp_path / address).stat().st_size == 30_000 and 23_900 < len(seen[0].encode()) <= 24_000
    head, tail = re.split(r"\n\[\.\.\..*\.\.\.\]\n", seen[0])
    assert 1.9 < len(head) / len(tail) < 2.1 and head.startswith("000000000\n") and tail.endswith("[exit status 0]")
    assert "  000000000\n  000000001\n  ... 2,997 more lines\n  000002999\n  [exit status 0]\n" in said(s)
    transcript = next((tmp_path / ".transcripts").glob("*.jsonl")).read_text()
    assert json.loads(transcript.splitlines()[3])["content"][0]["content"] == seen[0]
    later = [content for content in seen if content != seen[0]]
    assert seen[:4] == seen[:1] * 4 and len(set(later)) == 1 and 5 < len(later)
    assert re.fullmatch(rf"\[Previous: used bash: python3 -c .*\. 2[34],\d\d\d characters, whole output in {address}\]", later[0])
    freed = [int(size.replace(",", "")) for size in re.search(r"micro_compact: (\S+) -> (\S+)", said(s)).groups()]
    assert 20_000 <= freed[0] - freed[1] < 24_000


def test_a_forgotten_output_is_found_by_hand(serve, tmp_path):
    demo.make_project(tmp_path)
    s = session(serve(demo.model()), tmp_path, **{name.removeprefix("AGENT_").lower(): int(value)
                                                   for name, value in demo.LIMITS.items()})
    ask(s, demo.TASK)
    listing, which = [shell(line, tmp_path) for line in commands(block("ls -t .transcripts"))]
    names = {path.name for path in (tmp_path / ".transcripts").iterdir()} - {".gitignore"}
    assert set(listing.stdout.split()) == names and len(names) == 2
    assert f"{s.transcript.name}\n" in which.stdout and f"{s.transcript.folder}/toolu_03.txt\n" in which.stdout
    whole = (tmp_path / s.transcript.folder / "toolu_03.txt").read_text()
    assert whole.count("\n") == 78 and whole.count("FAILED") == 19


@pytest.mark.parametrize("row", table("you want | in"), ids=lambda row: row[1])
def test_a_change_of_one_line_does_what_the_readme_says(serve, tmp_path, monkeypatch, row):
    old, new = code(row[1])
    folder = copy(tmp_path)
    change(folder, "agent.py", old, new)   # the line is there, once
    if row[2]:
        name, value = code(row[2])[0].split("=")
        assert value == new.split(" = ")[1].strip('"') and f"# {name}" in (folder / "agent.py").read_text()

    def script(request):
        if is_summary(request):
            return "A summary."
        return Reply(call("read_file", {"path": f"f{len(api.requests)}.txt"})) if len(api.requests) < 12 else "done"

    api = serve(script)
    for n in range(20):
        (tmp_path / f"f{n}.txt").write_text(f"{n} " * 1000)
    settings = {"threshold": 6000, "keep_recent": 99}
    value = new.split(" = ")[-1]
    if "Task" in old:
        monkeypatch.setattr(agent, "SUMMARY", agent.SUMMARY.replace(old, new))
    elif "KEEP_FILES" in old:
        monkeypatch.setattr(agent, "KEEP_FILES", int(value))
        settings = {"keep_recent": 1, "clear_at_least": 0}
    elif "clear_at_least" in old:
        settings = {"keep_recent": 1, "clear_at_least": int(value)}
    else:
        settings[old.split(":")[0]] = value.strip('"') if '"' in value else int(value)
    s = session(api, tmp_path, **settings)
    assert ask(s, "read all") == "done"
    summaries = [request.body["model"] for request in api.requests if is_summary(request)]
    cleared = [result["content"].startswith("[Previous: ") for result in results(api.requests[-1].messages)]
    if old.startswith("threshold"):
        assert summaries == []
    elif old.startswith("summary_model"):
        assert summaries and set(summaries) == {"small"}
    elif "Task" in old:
        asked = [texts(request.messages[-1:]) for request in api.requests if is_summary(request)]
        assert asked and all("Headings: Task - Open risks - Done - " in text for text in asked)
    elif old.startswith("KEEP_FILES"):
        assert cleared == [True] * (len(cleared) - 1) + [False] and len(cleared) > 10
    else:
        assert said(s).count("[micro_compact: ") == len(cleared) - agent.KEEP_FILES


# ---------------------------------------------- The exercises ------------------------------------------------

EXERCISES = table("section | change")


def test_each_section_has_an_exercise():
    banners = re.findall(r"(?m)^# =+ (\d+)  (.*?) =+$", (ROOT / "agent.py").read_text())
    assert [row[0].split()[0] for row in EXERCISES] == [number for number, _ in banners]
    assert all(title.startswith(row[0].partition(" ")[2]) for row, (_, title) in zip(EXERCISES, banners))


@pytest.mark.parametrize("section,what,shown", EXERCISES, ids=[row[0] for row in EXERCISES])
def test_the_exercise(tmp_path, section, what, shown):
    name, old, new = code(what)
    folder = copy(tmp_path)
    change(folder, name, old, new)
    seen = one_line(shell("python3 tests/demo.py", folder).stdout)
    for no, words in re.findall(r"(no )?`([^`]+)`", shown):
        assert (words not in seen) if no else (words in seen)


def test_an_exercise_is_taken_back(tmp_path):
    folder = copy(tmp_path)
    shell("git init -q; git add .; git -c user.name=x -c user.email=x@x commit -qm x", folder)
    for _, what, _ in EXERCISES:
        change(folder, *code(what))
    assert shell("git checkout agent.py tests/demo.py", folder).returncode == 0
    assert all((folder / name).read_text() == (ROOT / name).read_text() for name in ("agent.py", "tests/demo.py"))


# ------------------------------------------------ The starter ------------------------------------------------

@pytest.fixture
def execute(monkeypatch, tmp_path):
    """Run Python of the README against a stand-in, in a directory of its own; what it changes is put back."""
    monkeypatch.chdir(tmp_path)
    for name in ("TOOLS", "TOOL_ROWS", "TOOL_HANDLERS"):
        monkeypatch.setattr(agent, name, getattr(agent, name).copy())
    monkeypatch.setattr(agent, "SYSTEM", agent.SYSTEM)

    def run_it(body, api):
        names = {"agent": agent}
        exec(body.replace("http://localhost:8080", api.url), names)
        return names

    return run_it


def test_the_module(serve, execute, capsys):
    api = serve([Reply(call("bash", {"command": "echo 1"})), "Fixed."])
    execute(block("import agent\n"), api)
    assert capsys.readouterr().out == "Fixed.\n" and len(api.requests) == 2


def test_the_tool(serve, execute, tmp_path):
    """It has under ten lines; the model is told of it, it runs, and it is asked for."""
    api = serve([Reply(call("append_line", {"path": "log.txt", "line": "hello"})), "done"])
    assert block("def run_append(").count("\n") < 10
    execute(block("def run_append("), api)
    asked = []
    s = session(api, tmp_path, allow=lambda name, args: asked.append(name) or "")
    assert ask(s, "log") == "done" and (tmp_path / "log.txt").read_text() == "hello\n" and asked == ["append_line"]
    told = api.requests[0].body["tools"][-1]
    assert (told["name"], told["description"]) == ("append_line", "Append a line to a file.")
    assert list(told["input_schema"]["properties"]) == ["path", "line"]
    source, last = (ROOT / "agent.py").read_text(), 'add_tool("compact", run_compact, "", "reads")\n'
    assert source.count(last) == 1
    inside = types.ModuleType("inside")
    sys.modules["inside"] = inside   # dataclasses look it up
    exec(source.replace(last, last + block("def run_append(").replace("agent.", "")), vars(inside))
    assert sys.modules.pop("inside").TOOLS[-1] == told


def test_the_permission_rule(serve, execute):
    api = serve([Reply(call("bash", {"command": "git status"}), call("bash", {"command": "touch x"})), "done"])
    s = execute(block("def allow("), api)["session"]
    assert ask(s, "go") == "done"
    ran, refused = [result["content"] for result in results(s.messages)]
    assert "[exit status" in ran and refused == "Not run: here only git status and the tests may be run"


def test_the_prompt_and_the_model(serve, execute, tmp_path):
    api = serve([Reply(call("bash", {"command": "touch x"})), "done"])
    body = block("agent.SYSTEM = ")
    assert ask(execute(body, api)["session"], "review") == "done" and not (tmp_path / "x").exists()
    sent = api.requests[0].body
    assert sent["model"] == "qwen3-coder" and texts([{"role": "user", "content": sent["system"]}]).startswith(
        f"You review Python code in {tmp_path.resolve()}.")


def test_a_smaller_agent_still_takes_the_tour(tmp_path):
    """All that the table says is deleted at once."""
    folder = copy(tmp_path)
    for _, functions, edits in table("without | delete"):
        source = (folder / "agent.py").read_text()
        nodes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        gone = {n for name in code(functions) for n in range(nodes[name].lineno, nodes[name].end_lineno + 1)}
        words, lines = code(edits), source.splitlines()
        if len(words) == 1:
            gone |= {n for n in range(nodes["main"].lineno, nodes["main"].end_lineno + 1) if words[0] in lines[n - 1]}
        (folder / "agent.py").write_text("\n".join(line for n, line in enumerate(lines, 1) if n not in gone))
        if len(words) == 2:
            change(folder, "agent.py", *words)
    done = shell("python3 tests/demo.py", folder)
    assert done.returncode == 0 and "ALL PASS" in done.stdout and "0 of them invalid" in done.stdout


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print("\n".join(real_screen(Path(name).resolve())))
