"""The README holds: each of its blocks, commands, tables, exercises and pictures is tried here.

1 Nothing is left out    3 The tour         5 Use it            7 Take it as your starter
2 Two commands           4 The pictures     6 How it forgets
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

import demo
import pexpect
import pytest
import screen
from harness import ROOT, agent, environment, make_agent, results, said, texts
from messages_api import Fault, MessagesAPI, Reply, call, is_summary

README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCE = (ROOT / "agent.py").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", README)
PROSE = re.sub(r"(?ms)^```.*?^```$", "", README)
BANNERS = re.findall(r"(?m)^# =+ (\d+)  (.*?) =+$", SOURCE)

# What tries each block, by how it begins, and each command that stands in a sentence.
TRIED = {
    'python3 -m venv .venv && .venv/bin/python -m pip install -q "': "test_the_two_lines",
    "python3 -m venv .venv && .venv/bin/python -m pip install -q -r": "test_the_two_lines",
    "python tests/demo.py": "test_the_tour",
    "ANTHROPIC_BASE_URL=": "test_a_server_of_ones_own",
    "python agent.py ": "test_each_way_to_use_it",
    "[####": "test_the_status_line",
    "ls -t .transcripts": "test_a_forgotten_output_is_found_by_hand",
    "import agent\n": "test_the_module",
    "def word_count(": "test_the_tool",
    "def allow(": "test_the_permission_rule",
}
COMMANDS = {
    "uv run agent.py": "test_the_packages",
    "python agent.py": "test_a_server_of_ones_own",
    "python tests/demo.py": "test_each_exercise",
    "python tests/bench.py": "test_the_bench",
    "git checkout agent.py": "(what git itself does)",
    "kill -9": "(a test of the transcript)",
    "rm -rf ~": "(nobody tries that)",
}


def bare(line):
    """A command without the path of its Python."""
    return re.sub(r"^(\.venv/bin/)?python3? (?!-)", "python ", line)


def block(start):
    (found,) = [body for _, body in BLOCKS if bare(body).startswith(start)]
    return found


def commands(body):
    return [line.split("  #")[0].strip() for line in body.splitlines()]


def table(head):
    """The rows of the table whose first line begins like this, as lists of cells."""
    lines = PROSE[PROSE.index("\n| " + head) + 1 :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def one_line(text):
    return " ".join(text.split())


def write_program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


OWN_PYTHON = tempfile.TemporaryDirectory()
for name in ("python3", "python"):
    write_program(Path(OWN_PYTHON.name) / name, f'exec {shlex.quote(sys.executable)} "$@"')


def shell(line, cwd, api=None, stdin="", **env):
    """A line of the README in Bash. Outside of an environment, Python is the one of the tests."""
    env = {"PATH": f"{OWN_PYTHON.name}:{os.environ['PATH']}", **env}
    command = ["bash", "-c", line]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(api, **env),
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def copy_of(folder, *names):
    """These files of the project in a folder of their own, where they can be changed."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


# ================================ 1  Nothing is left out ================================


def test_every_block_and_every_command_in_a_sentence_is_tried_by_a_test():
    starts = [[start for start in TRIED if bare(body).startswith(start)] for _, body in BLOCKS]
    assert sorted(starts) == sorted([start] for start in TRIED)
    spans = {bare(span) for span in code(PROSE)}
    words = r"(python|uv|git|cat|ls|grep|kill|pip|rm) "
    assert {span for span in spans if re.match(words, span)} == set(COMMANDS)
    tests = [name for name in globals() if name.startswith("test_")]
    for name in [*TRIED.values(), *COMMANDS.values()]:
        assert name.startswith("(") or any(test.startswith(name) for test in tests), name


def test_every_file_that_is_linked_or_named_is_there():
    linked = re.findall(r"\]\(([^):]+)\)", README)
    named = [
        span for span in code(PROSE) if re.fullmatch(r"(tests/)?[\w.]+\.(py|txt|example)", span)
    ]
    missing = [name for name in linked + named if not (ROOT / name).exists()]
    assert missing == ["s06_context_compact.py"]  # of another repository
    assert (ROOT / "LICENSE").read_text().startswith("MIT License") and "MIT licence" in README


# ================================== 2  Two commands ==================================


def run_line():
    return block('python3 -m venv .venv && .venv/bin/python -m pip install -q "').strip()


def test_line():
    marked = re.search(r"(?s)<!-- test -->\n```bash\n(.*?)\n```\n<!-- /test -->", README)
    return marked[1]


test_line.__test__ = False


def test_the_packages_are_named_alike_everywhere():
    header = re.search(r"(?ms)^# /// script\n(.*?)^# ///$", SOURCE)[1]
    wanted = json.loads(re.search(r"dependencies = (\[.*\])", header)[1])
    assert re.findall(r'"([^"]+)"', run_line()) == wanted
    assert (ROOT / "tests/requirements.txt").read_text().splitlines()[: len(wanted)] == wanted
    assert run_line().replace(" -q ", " ") == agent.INSTALL
    assert 'requires-python = ">=3.10"' in header and "Python 3.10 or newer" in README
    assert "py310" in (ROOT / "ruff.toml").read_text()


def test_each_python_is_that_of_the_environment_in_which_the_packages_are():
    lines = [line for _, body in BLOCKS for line in body.splitlines()] + code(PROSE)
    others = [c for c in lines if re.search(r"(?<!\.venv/bin/)\bpython3? (agent\.py|tests/)", c)]
    assert others == [] or "bin/activate" in README


def test_the_two_lines_make_an_environment_and_run_and_test_in_it(serve, tmp_path):
    """Both as they stand, but without a network: what they install is there already."""
    folder = copy_of(tmp_path / "a folder", "agent.py", "tests/requirements.txt")
    (folder / "tests/test_one.py").write_text("def test_one():\n    pass\n")
    installed = os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    env = {"PYTHONPATH": installed, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env |= {"PYTEST_ADDOPTS": "", "PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}
    lines = [run_line(), test_line()]
    if find_spec("pip"):  # making a second one would take long
        lines = [line.replace("-m venv ", "-m venv --without-pip ") for line in lines]
    ran = shell(lines[0], folder, serve(), "/help\n", **env)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("", agent.HELP + "\n", 0)
    tested = shell(lines[1], folder, **env)
    assert "1 passed" in tested.stdout and (tested.stderr, tested.returncode) == ("", 0)


def test_ci_runs_the_line_that_tests_it_in_a_clean_clone(tmp_path):
    folder = copy_of(tmp_path / "here", ".ci/run", "README.md")
    assert shell("git init -q && git add . && git commit -qm x", folder, **COMMITTER).stderr == ""
    write_program(tmp_path / "bin/bash", 'printf "%s\\n" "$1" "$2" "$PWD" > "$SEEN"; exit 7')
    real = shutil.which("bash")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = environment(None, PATH=path, SEEN=str(tmp_path / "seen"))
    done = subprocess.run([real, ".ci/run"], cwd=folder, env=env, capture_output=True)
    flag, line, clone = (tmp_path / "seen").read_text(encoding="utf-8").splitlines()
    assert (flag, line, done.returncode) == ("-c", test_line(), 7)
    assert Path(clone) != folder and not Path(clone).exists()


COMMITTER = {"GIT_AUTHOR_NAME": "x", "GIT_AUTHOR_EMAIL": "x@x"}
COMMITTER |= {"GIT_COMMITTER_NAME": "x", "GIT_COMMITTER_EMAIL": "x@x"}


# ==================================== 3  The tour ====================================

EXERCISES = table("section | change")
TOUR = ("agent.py", "tests/demo.py", "tests/messages_api.py")


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """What the first line of the block prints, in a pipe."""
    folder = copy_of(tmp_path_factory.mktemp("tour") / "here", *TOUR)
    write_program(folder / ".venv/bin/python", f'exec {shlex.quote(sys.executable)} "$@"')
    done = shell(commands(block("python tests/demo.py"))[0], folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_tour_tells_all_steps_and_shows_a_bar_before_and_after_each_layer(tour):
    assert "\x1b" not in tour and max(map(len, tour.splitlines())) <= 80
    parts = re.split(r"(?m)^Step (\d+) of 11\. (.*)\n", tour)
    assert parts[1::3] == [str(number) for number in range(1, 12)]
    assert parts[2::3] == [title for _, title in demo.STEPS]
    bars = r" +before \[(#+)\.*\] ([\d,]+) of 3,000 tokens\n +after  \[(#+)\.*\] ([\d,]+) of"
    for number, layer in ((4, "micro"), (6, "auto"), (9, "auto")):
        sizes = re.search(rf"\[{layer}_compact: ([\d,]+) -> ([\d,]+) tokens", parts[3 * number])
        before, tokens_before, after, tokens_after = re.search(bars, parts[3 * number]).groups()
        assert sizes.groups() == (tokens_before, tokens_after) and len(before) > len(after)
    for number, words in (
        (4, "[Previous: used bash; whole output in .transcripts/"),
        (6, demo.SUMMARY.splitlines()[0]),
        (6, demo.TASK),
        (8, "ALL PASS"),
        (10, "Fixed: median()"),
        (11, "10 requests, 0 of them invalid."),
    ):
        assert words in one_line(parts[3 * number])
    address = re.search(r"\$ cat (\S+)", parts[33])[1]
    assert f"    {address} " in parts[33] and "FAILED" in parts[33].split("$ cat")[1]


@pytest.mark.slow
def test_the_tour_with_step_waits_for_enter_on_a_terminal():
    line = commands(block("python tests/demo.py"))[1]
    assert bare(line) == "python tests/demo.py --step"
    child = pexpect.spawn(
        sys.executable,
        line.split()[1:],
        cwd=str(ROOT),
        env=environment(None),
        encoding="utf-8",
        timeout=60,
        dimensions=(40, 80),
    )
    log = child.logfile_read = io.StringIO()
    for number in range(1, 11):
        child.expect_exact("(Enter) ")
        assert re.findall(r"Step (\d+) of", log.getvalue())[-1] == str(number)
        child.sendline()
    child.expect_exact("0 of them invalid.")
    child.expect(pexpect.EOF)


class Lines(io.TextIOBase):
    """A stream that passes whole lines on."""

    def __init__(self, queue):
        self.queue = queue
        self.rest = ""

    def write(self, text):
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.queue.put(line)
        return len(text)


def tour_after(change, folder, monkeypatch):
    """What the tour shows after a change in agent.py, in this process: eleven more are slow."""
    old, *new = code(change)
    assert SOURCE.count(old) == 1, f"{old!r} stands {SOURCE.count(old)} times in agent.py"
    assert len(new) == 1 or change.endswith(" to nothing")
    changed = types.ModuleType("changed")
    monkeypatch.setitem(sys.modules, "changed", changed)  # dataclasses look it up
    exec(compile(SOURCE.replace(old, "".join(new)), "agent.py", "exec"), vars(changed))
    folder.mkdir()
    demo.make_project(folder)
    limits = {n.removeprefix("AGENT_").lower(): int(value) for n, value in demo.LIMITS.items()}
    with MessagesAPI(demo.model()) as api:
        lines = SimpleQueue()
        shown = changed.Screen(Lines(lines), Lines(lines))
        allow = changed.Permission(shown, is_asking=False)
        settings = changed.Settings(api_key="k", base_url=api.url, **limits)
        worker = changed.Agent(settings, folder, allow, shown)
        with ThreadPoolExecutor() as pool, redirect_stdout(io.StringIO()) as out:
            work = pool.submit(changed.turn, worker, demo.TASK)
            work.add_done_callback(lambda done: lines.put(None))
            tour = demo.Tour(folder, api, waits=False)
            for line in iter(lines.get, None):
                tour.line(line)
            tour.end()
            work.result()
        assert api.refused == []
    return one_line(out.getvalue())


def test_each_exercise_shows_its_line_in_the_tour_and_the_tour_without_it_does_not(
    tmp_path, tour, monkeypatch
):
    words = [code(row[2])[0] for row in EXERCISES]
    tours = [tour_after(row[1], tmp_path / row[0], monkeypatch) for row in EXERCISES]
    assert [word for word, seen in zip(words, tours, strict=True) if word not in seen] == []
    assert [word for word in words if word in one_line(tour)] == []


def test_the_banners_the_picture_of_the_file_and_the_exercises_have_the_same_sections():
    assert [row[0] for row in EXERCISES] == [f"{number} {title}" for number, title in BANNERS]
    numbers = [number for number, _ in BANNERS]
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    picture = SOURCE[: SOURCE.index("from __future__")]
    assert sorted(set(re.findall(r"\[(\d+)\]", picture)), key=int) == numbers
    for name, number in re.findall(r"`agent\.([A-Z]+)` \(section (\d+)\)", README):
        section = SOURCE[SOURCE.index(f"= {number}  ") : SOURCE.index(f"= {int(number) + 1}  ")]
        assert f"\n{name} = " in section


# ================================== 4  The pictures ==================================

SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_shows_what_the_tour_prints_now(tour):
    """Ids, numbers and bars apart. If not, make it anew: python tests/screen.py"""

    def words(lines):
        return re.sub(r"\d+T\d+Z-\w+|\[#*\.*\]|\d[\d,.]*[kM]?", "0", "\n".join(lines)).split()

    lines = ElementTree.parse(ROOT / "tests/screen.svg").iter(SVG + "text")
    shown = words(line.text or "" for line in lines)
    assert shown == words(screen.shown_lines(tour.splitlines()))


@pytest.mark.parametrize("name", re.findall(r"!\[[^]]+\]\((.*?)\)", README))
def test_each_picture_is_well_formed_and_has_colours_for_dark_pages(name):
    picture = ElementTree.parse(ROOT / name).getroot()
    assert picture.tag == SVG + "svg" and len(list(picture.iter(SVG + "text"))) > 9
    assert "prefers-color-scheme: dark" in picture.find(SVG + "style").text


# ==================================== 5  Use it ====================================

START = re.compile(
    r"(?:(?P<feed>.+) \| )?(?P<env>(?:[A-Z_]+=\S+ )*)(?:\.venv/bin/)?python agent\.py"
    r" ?(?P<args>[^<]*)(?:< (?P<file>.*))?"
)


@pytest.fixture
def start(monkeypatch, capsys, tmp_path):
    """start(line, api): a line of the README, here. Returns the exit status and stdout."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setattr(agent, "__file__", str(tmp_path / "agent.py"))  # no .env beside it
    for name in os.environ:
        if name.startswith(("ANTHROPIC_", "AGENT_", "MODEL_")):
            monkeypatch.delenv(name)

    def run_line(line, api, typed="", **env):
        parts = START.fullmatch(line)
        if parts["feed"]:
            typed = shell(parts["feed"], folder).stdout
        if parts["file"]:
            typed = (folder / parts["file"]).read_text()
        with monkeypatch.context() as patch:
            for name, value in {**env, **dict(v.split("=") for v in parts["env"].split())}.items():
                is_address = name == "ANTHROPIC_BASE_URL"
                patch.setenv(name, api.url if is_address else value)
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["agent.py", *shlex.split(parts["args"])])
            (tmp_path / "typed").write_text(typed)
            with open(tmp_path / "typed" if typed else os.devnull) as stdin:
                patch.setattr(sys, "stdin", stdin)
                return agent.main(), capsys.readouterr().out

    return run_line


def test_each_way_to_use_it(serve, start, tmp_path):
    def script(request):
        if texts(request.messages[-1:]) == "run the tests":
            return Reply(call("bash", {"command": "echo RAN > ran.txt"}))
        return f"Answer {len(api.requests)}"

    api = serve(script)
    folder = tmp_path / "here"
    (folder / "task.txt").write_text("a task from a file\n")
    shell("git init -q; git add task.txt; echo 'a changed line' >> task.txt", folder)
    typed = ["hello\nand more\n", "go on\n", "", "", "", ""]
    lines = commands(block("python agent.py "))
    env = {"ANTHROPIC_BASE_URL": "", "ANTHROPIC_API_KEY": "k"}
    seen = [start(line, api, words, **env) for line, words in zip(lines, typed, strict=True)]
    assert seen == [
        (0, "Answer 1\nAnswer 2\n"),
        (0, "Answer 3\n"),
        (0, "Answer 4\n"),
        (0, "Answer 6\n"),
        (0, "Answer 7\n"),
        (0, "Answer 8\n"),
    ]
    sent = [texts(request.messages, "user") for request in api.requests]
    assert sent[1:3] == ["hello\nand more", "hello\nand more\ngo on"]
    assert sent[3] == "fix the failing test" and (folder / "ran.txt").read_text() == "RAN\n"
    assert sent[6].startswith("[Standard input]\ndiff --git") and sent[6].endswith("\nreview this")
    assert "+a changed line" in sent[6] and sent[7] == "a task from a file\na changed line\n"


def test_a_server_of_ones_own_needs_no_key_and_the_limits_fit_its_window(serve, start):
    rows = {server: code(cell)[0] for server, cell in table("server | set")}
    whole = block("ANTHROPIC_BASE_URL=").strip()
    assert whole == rows["llama.cpp"] + " python agent.py"
    for server, variables in rows.items():
        values = dict(pair.split("=") for pair in variables.split())
        tells = server == "llama.cpp"
        listed = [{"id": "tiny", "meta": {"n_ctx": 8192}}] if tells else Fault(404)
        api = serve(["Hello, too."], models=listed)
        line = f"{variables} .venv/bin/python agent.py"
        assert start(line, api, "hello\n") == (0, "Hello, too.\n")
        sent = api.requests[0].body
        assert "ANTHROPIC_BASE_URL" in values
        assert sent["model"] == ("tiny" if tells else values.get("MODEL_ID", agent.DEFAULT_MODEL))
        room = 2048 if tells else int(values.get("AGENT_MAX_TOKENS", agent.MAX_TOKENS))
        assert sent["max_tokens"] == room
        if "AGENT_THRESHOLD" in values:
            assert int(values["AGENT_THRESHOLD"]) + room <= 8192


def test_every_setting_has_the_same_default_in_the_readme_the_example_and_the_code(
    monkeypatch, tmp_path
):
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    lines = dict(re.findall(r"(?m)^# ([A-Z_]+)=(\S*)", example))
    readme = {code(row[0])[0]: row[1].strip("`") for row in table("variable | default")}
    wanted = {"ANTHROPIC_API_KEY": "", "ANTHROPIC_AUTH_TOKEN": ""}
    wanted |= {"ANTHROPIC_BASE_URL": agent.ANTHROPIC, "MODEL_ID": agent.DEFAULT_MODEL}
    budget = agent.Budget(fixed=0)
    budget.fit(agent.Settings())
    fitted = {"threshold": budget.limit, "clear_at_least": budget.clear_at_least}
    fitted["max_tokens"] = budget.max_reply
    for setting in fields(agent.Settings)[4:]:
        value = fitted.get(setting.name, setting.default)
        wanted["AGENT_" + setting.name.upper()] = (
            value if isinstance(value, str) else f"{value:.0f}"
        )
    assert list(wanted.items()) == list(lines.items()) == list(readme.items())

    # the example as a .env, each line switched on
    monkeypatch.setattr(agent, "__file__", str(tmp_path / "agent.py"))
    for name in wanted:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    (tmp_path / ".env").write_text(re.sub(r"(?m)^# ([A-Z_]+=)", r"\1", example))
    fitted = {name: int(value) for name, value in fitted.items()}
    default = agent.Settings(api_key="k", model=agent.DEFAULT_MODEL)
    assert agent.read_settings() == replace(default, **fitted)


def test_every_command_of_the_prompt_stands_in_the_readme_and_in_the_help():
    rows = [code(row[0]) for row in table("command | what")]
    names = [name.split()[0] for row in rows for name in row]
    helped = re.findall(r"(?m)^(/\w+)", agent.HELP)
    assert names == [*agent.COMMANDS, "/exit"] == [*helped[:-1], "/help", helped[-1]]
    argument = re.findall(r"/\w+ \[\w+\]", README)
    assert set(argument) == set(re.findall(r"/\w+ \[\w+\]", agent.HELP))


def test_the_status_line_is_the_one_that_is_explained(serve, tmp_path):
    a = make_agent(serve(), tmp_path)
    a.budget.fixed = 41_000
    a.model.spent = Counter(input=1_200_000, cached=1_044_000, output=8_200)
    a.forgot = 31_000
    assert agent.status_line(a) + "\n" == block("[####")


# ================================ 6  How it forgets ================================


def test_a_test_log_of_30000_characters_is_cut_for_the_model_and_becomes_one_line(serve, tmp_path):
    lines = ["seq 10001 15000", *(f"echo {n}" for n in range(5))]
    script = [Reply(call("bash", {"command": line})) for line in lines]
    api = serve([*script, "done"])
    a = make_agent(api, tmp_path, clear_at_least=5_000)
    a.run("test")
    seen = [results(request.messages)[0]["content"] for request in api.requests[1:]]
    head, left, address, tail = re.fullmatch(
        r"(?s)(.*)\n\[\.\.\. ([\d,]+) bytes left out; the whole is in (\S+) \.\.\.\]\n(.*)", seen[0]
    ).groups()
    assert re.fullmatch(rf"\.transcripts/{a.transcript.id}/toolu_\w+\.txt", address)
    whole = (tmp_path / address).read_text()
    assert len(whole) == 30_000 and whole.startswith(head)
    assert 15_800 < len(head) <= 16_000 and 7_800 < len(tail) <= 8_000
    assert tail.endswith("14999\n15000\n[exit status 0]")
    assert int(left.replace(",", "")) == len(whole + "[exit status 0]") - len(head + tail)
    later = f"[Previous: used bash; whole output in {address}]"
    assert seen == [seen[0]] * 3 + [later] * 3
    assert later.replace(address, ".transcripts/<id>/<call>.txt") in code(PROSE)
    agent.show_context(a, "")
    assert later in said(a).split("[micro_compact")[1]  # /context lists the files


def test_a_forgotten_output_is_found_by_hand(serve, tmp_path):
    line = "for n in {1..99}; do echo test $n FAILED; done"
    folder = tmp_path / "here"
    folder.mkdir()
    talks = []
    for command in ("seq 1 300", line):
        talks.append(make_agent(serve([Reply(call("bash", {"command": command})), "done"]), folder))
        talks[-1].run("test")
    listing, found = (shell(c, folder).stdout.splitlines() for c in commands(block("ls -t ")))
    ids = [a.transcript.id for a in reversed(talks)]
    assert sorted(listing) == sorted([name for id in ids for name in (id, id + ".jsonl")])
    assert [name for name in listing if name.endswith(".jsonl")] == [id + ".jsonl" for id in ids]
    (output,) = [name for name in found if name.endswith(".txt")]
    assert set(found) == {output, talks[1].transcript.name}
    assert (folder / output).read_text().count("FAILED\n") == 99


@pytest.fixture
def read_twelve(serve, tmp_path, monkeypatch):
    """read_twelve(**env): twelve files are read. Returns what was cleared, and who summarised."""

    def run(**env):
        calls = [call("read_file", {"path": f"{number}.txt"}) for number in range(1, 13)]
        replies = iter([*map(Reply, calls), "done"])
        api = serve(lambda request: "A summary." if is_summary(request) else next(replies))
        for name, value in {"ANTHROPIC_BASE_URL": api.url, "MODEL_ID": "large", **env}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(agent, "__file__", str(tmp_path / "agent.py"))
        a = make_agent(api, tmp_path)
        a = agent.Agent(agent.read_settings(), tmp_path, a.allow, a.screen)
        assert a.run("read all") == "done"
        for name in env:
            monkeypatch.delenv(name)
        cleared = [r["content"].startswith("[Previous: ") for r in results(a.messages)]
        return cleared, [r.body["model"] for r in api.requests if is_summary(r)]

    for number in range(1, 13):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 1000)
    return run


def test_what_can_be_changed_of_forgetting_does_what_is_said(read_twelve, monkeypatch):
    change = re.search(r"(?s)\*\*Change it:\*\*(.*?)\n\n", README)[1]
    never, always, other, readings, _ = code(change)
    limit = {"AGENT_THRESHOLD": "5000"}
    nothing = [False] * 12

    def env(setting):
        return dict([setting.split("=")])

    assert read_twelve() == (nothing, [])
    assert set(read_twelve(**limit)[1]) == {"large"}
    assert read_twelve(**limit | env(never)) == (nothing, [])
    assert read_twelve(**env(always)) == ([True] * 4 + [False] * 8, [])
    assert set(read_twelve(**limit | env(other))[1]) == {"small"}
    name, value = readings.split(" = ")
    assert SOURCE.count(f"\n{name} = ") == 1
    monkeypatch.setattr(agent, name, int(value))
    assert read_twelve(**env(always)) == ([True] * 9 + [False] * 3, [])


def test_the_bench_has_the_options_that_it_is_said_to_have():
    assert "[PATH ...]" in shell("python tests/bench.py --help", ROOT).stdout


# ============================= 7  Take it as your starter =============================


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """Run Python of the README in a directory of its own; what it changes is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent, "TOOLS", agent.TOOLS.copy())

    def run(start, api=None):
        names = {"agent": agent}
        exec(block(start).replace("http://localhost:8080", api.url if api else ""), names)
        return names

    return run


def test_the_module(serve, execute, capsys, tmp_path):
    api = serve([Reply(call("bash", {"command": "echo 1 > ran"})), "Fixed."])
    execute("import agent\n", api)
    assert capsys.readouterr().out == "Fixed.\n" and (tmp_path / "ran").exists()
    assert api.requests[0].messages[0]["content"] == [
        {"type": "text", "text": "fix the failing test"}
    ]


def test_importing_it_does_nothing(tmp_path):
    folder = copy_of(tmp_path / "here", "agent.py")
    line = "python -B -c 'import agent, sys; sys.exit(\"anthropic\" in sys.modules)'"
    done = shell(line, folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.listdir(folder) == ["agent.py"]


def test_the_tool_is_told_to_the_model_and_asks_if_it_is_to(serve, execute, tmp_path):
    execute("def word_count(")
    (tmp_path / "a.txt").write_text("five words are in here")
    calls = [call("word_count", {"path": path}) for path in ("a.txt", "b.txt")]
    api = serve([Reply(*calls), "done"] * 2)
    make_agent(api, tmp_path, allow=agent.read_only).run("count")
    assert api.requests[0].body["tools"][-1] == {
        "name": "word_count",
        "description": "Count the words of a file.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    }
    right, wrong = results(api.requests[1].messages)
    assert right["content"] == "5 words" and wrong["is_error"] is True
    types = code(re.search(r"its arguments \((.*?)\)", one_line(README))[1])
    assert list(agent.TYPES) == types
    agent.TOOLS["word_count"] = replace(agent.TOOLS["word_count"], asks=True)
    a = make_agent(api, tmp_path, allow=agent.read_only)
    a.run("count")
    assert {r["content"] for r in results(a.messages)} == {"Not run: this agent may only read"}


def test_the_permission_rule_compares_whole_commands(serve, execute, tmp_path):
    lines = ["git status", "git status; touch x"]
    calls = [call("bash", {"command": line}) for line in lines]
    calls.append(call("write_file", {"path": "x", "content": "y"}))
    a = make_agent(serve([Reply(*calls), "done"]), tmp_path, execute("def allow(")["allow"])
    a.run("go")
    ran, *refused = [result["content"] for result in results(a.messages)]
    assert "[exit status" in ran and not (tmp_path / "x").exists()
    assert refused == ["Not run: here only git status and the tests may be run"] * 2


def test_the_prompts_can_be_changed_before_an_agent_is_made(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "SYSTEM", "You review {{code}} in {cwd}.")
    monkeypatch.setattr(agent, "SUMMARY", "Write the summary as {{json}}. Keep {}.")
    api = serve(lambda request: "A summary." if is_summary(request) else "word " * 2000)
    a = make_agent(api, tmp_path)
    a.run("review")
    assert a.auto_compact("names")
    assert api.requests[0].body["system"] == f"You review {{code}} in {tmp_path.resolve()}."
    assert texts(api.requests[1].messages[-1:]) == "Write the summary as {json}. Keep names."
