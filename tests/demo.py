"""An offline tour of agent.py: the real agent and real tools; only the model is scripted.

    python tests/demo.py            all of it, in well under a minute
    python tests/demo.py --step     waits for Enter before each step

A small project with a failing test is made in a temporary directory. A stand-in for the Messages
API, on this machine, plays a model that reads, runs the tests, edits and runs them again. The
threshold is so low (3,000 tokens in place of 100,000) that each of the three layers acts and shows
the context before and after. No key is needed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from messages_api import (  # noqa: E402
    Block,
    Item,
    MessagesAPI,
    Reply,
    Request,
    call,
    is_summary,
    text,
)

AGENT = Path(__file__).resolve().parent.parent / "agent.py"
TASK = "One test of this project fails. Find out why and fix it. Rule: do not change the tests."
LIMITS = {"AGENT_THRESHOLD": "3000", "AGENT_CLEAR_AT_LEAST": "400", "AGENT_KEEP_RECENT": "1"}
READ_TIME = (
    3.0  # seconds that a step stays before the next one, on a terminal; a layer twice as long
)

# ---------------- The project ----------------

STATS = '''"""Small statistics, written out."""


def mean(numbers):
    return sum(numbers) / len(numbers)


def median(numbers):
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle]
'''
TESTS = """from stats import mean, median


def check(name, found, wanted):
    word = "ok" if found == wanted else "FAILED"
    print(f"{name:20} found {found!r:>5}  wanted {wanted!r:>5}  {word}")
    return found == wanted


if __name__ == "__main__":
    results = []
    for n in range(1, 40):
        results.append(check(f"mean of 1 to {n}", mean(range(1, n + 1)), (n + 1) / 2))
    for n in range(1, 40):
        results.append(check(f"median of 1 to {n}", median(range(1, n + 1)), (n + 1) / 2))
    raise SystemExit(0 if all(results) else 1)
"""
NOTES = "\n".join(
    f"{n:02}. Keep function number {n} short, and cover it by a test." for n in range(1, 60)
)
FILES = {"stats.py": STATS, "test_stats.py": TESTS, "notes.txt": NOTES}
FIXED = """    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
"""

# ---------------- The model ----------------
# Its replies, one a request. They print nothing: the tour is told from what the agent writes.

REPLIES = [
    Reply(
        text("Let me see."),
        call("bash", {"command": "ls"}, id="toolu_01"),
        call("read_file", {"path": "notes.txt"}, id="toolu_02"),
    ),
    Reply(call("bash", {"command": "python3 test_stats.py"}, id="toolu_03")),
    Reply(call("read_file", {"path": "stats.py"}, id="toolu_04")),
    Reply(
        call("bash", {"command": "cat test_stats.py notes.txt"}, id="toolu_05"),
        call("bash", {"command": "python3 test_stats.py | grep median"}, id="toolu_06"),
        call("bash", {"command": "sort -r notes.txt"}, id="toolu_07"),
    ),
    Reply(
        text("The median of an even count is wrong."),
        call(
            "edit_file",
            {"path": "stats.py", "old_text": "    return ordered[middle]\n", "new_text": FIXED},
            id="toolu_08",
        ),
    ),
    Reply(call("bash", {"command": "python3 test_stats.py && echo ALL PASS"}, id="toolu_09")),
    Reply(call("compact", {"focus": "what was wrong in stats.py"}, id="toolu_10")),
    Reply(
        text(
            "Fixed: median() took the upper middle element; now it takes the mean of both.\n"
            "All tests pass."
        )
    ),
]
SUMMARY = """Task: make the failing test pass without changing the tests.
Done: read notes.txt and stats.py, ran test_stats.py.
Findings: of an even count, median() must be the mean of both middle elements.
Next step: edit median() in stats.py, run python3 test_stats.py."""
SUMMARY_AT_THE_END = """Task: make the failing test pass without changing the tests.
Done: median() in stats.py takes the mean of both middle elements; all tests pass.
Next step: tell the user."""


def model() -> object:
    """The script: the next reply for each request, a summary whenever one is asked for."""
    replies = iter(REPLIES)

    def answer(request: Request) -> Item:
        if is_summary(request):
            return (
                SUMMARY_AT_THE_END if "Edited stats.py" in json.dumps(request.messages) else SUMMARY
            )
        return next(replies)

    return answer


# ---------------- The story ----------------
# A step begins with the line of the agent that starts as the first column says. One thread reads
# those lines and prints both them and the titles, so there is only one order of them.


STEPS = [
    ("> bash: ls", "It looks around. Everything is written to .transcripts/ first."),
    ("> bash: python3 test_stats.py", "It runs the tests: 78 lines that nobody needs twice."),
    ("> read_file: stats.py", "It reads on. The context fills."),
    ("[micro_compact: ", "LAYER 1, micro_compact: old output becomes one line."),
    ("> bash: cat test_stats.py", "It reads more than there is room for."),
    ("[auto_compact: ", "LAYER 2, auto_compact: it is full. A summary takes over."),
    ("> edit_file: ", "It goes on from the summary, and edits."),
    ("> bash: python3 test_stats.py && ", "It runs the tests again."),
    ("> compact: ", "LAYER 3, the compact tool: the model itself asks for room."),
    ("Fixed: ", "It answers."),
    ("", "Nothing is lost: what .transcripts/ holds now."),
]


class Tour:
    def __init__(self, project: Path, api: MessagesAPI, waits: bool) -> None:
        self.project, self.api, self.waits, self.at = project, api, waits, 0

    def show(self, line: str, indent: str = "    ") -> None:
        """Print a line, wrapped at 80 columns."""
        first = indent + line[: len(line) - len(line.lstrip())]
        wrapped = textwrap.wrap(
            line.strip(),
            79,
            initial_indent=first,
            subsequent_indent=first + "  ",
            break_on_hyphens=False,
        )
        print("\n".join(wrapped or [""]), flush=True)

    def step(self, number: int) -> None:
        """Print the title of a step, and leave time to read the one before."""
        if self.waits and self.at:
            print("    (Enter)", end=" ", flush=True)
            if not sys.stdin.readline().endswith("\n") or not sys.stdin.isatty():
                print()
        elif self.at and sys.stdout.isatty():
            time.sleep(READ_TIME * (2 if "LAYER" in STEPS[self.at - 1][1] else 1))
        for missed in range(self.at + 1, number):
            print(f"\nStep {missed} of {len(STEPS)} did not happen.")
        print()
        self.show(f"Step {number} of {len(STEPS)}. {STEPS[number - 1][1]}", "")
        self.at = number

    def line(self, line: str) -> None:
        """One line of the agent: the title of the step that it begins, the line, what it means."""
        number = next(
            (
                n
                for n, (start, _) in enumerate(STEPS[:-1], 1)
                if n > self.at and line.startswith(start)
            ),
            0,
        )
        if number:
            self.step(number)
        self.show(line)
        if sizes := re.match(r"\[(micro|auto)_compact: ([\d,]+) -> ([\d,]+) tokens", line):
            before, after = (int(size.replace(",", "")) for size in sizes.groups()[1:])
            self.bar("before", before, before)
            self.bar("after ", after, before)
            if number:
                self.explain([before, after])

    def bar(self, name: str, tokens: int, before: int) -> None:
        threshold = int(LIMITS["AGENT_THRESHOLD"])
        filled = "#" * round(30 * min(1, tokens / (threshold or before)))
        of_all = f"of {threshold:,} tokens" if threshold else "tokens, no threshold"
        print(f"    {name} [{filled:.<30}] {tokens:,} {of_all}")

    def explain(self, tokens: list[int]) -> None:
        """What the model sees in place of what was taken out. (The agent may be further on.)"""
        if not (views := [view for view in self.records("view") if view["tokens"] == tokens]):
            self.show("In place of each old output the model now sees one line, such as:")
            self.show(self.placeholder(), "      ")
        else:
            memory, *newest = views[0]["messages"]
            newest_too = f"the {len(newest)} newest messages and, " if newest else ""
            self.show(f"The model now sees {newest_too}in place of all the rest:")
            for line in "\n".join(block["text"] for block in memory["content"]).splitlines():
                self.show(line, "      ")

    def placeholder(self) -> str:
        """The first line for a cleared result that was sent. The request follows within moments."""
        for _ in range(200):
            for request in list(self.api.requests):
                if found := re.search(r"\[Previous: used [^\]]*\]", json.dumps(request.messages)):
                    return found[0]
            time.sleep(0.05)
        return "(none was sent)"

    def records(self, kind: str) -> list[Block]:
        """The lines of the transcript of this kind: "role" is a message, "view" a summary."""
        found = [path.read_text() for path in (self.project / ".transcripts").glob("*.jsonl")]
        lines = (found or [""])[0].split("\n")
        return [record for record in map(json.loads, lines[:-1]) if kind in record]

    def end(self) -> None:
        """What is on disk; and one result that was forgotten, opened by its address."""
        self.step(len(STEPS))
        for path in sorted((self.project / ".transcripts").rglob("*")):
            if path.is_file() and path.name != ".gitignore":
                self.show(f"{path.relative_to(self.project)} {path.stat().st_size:,} bytes")
        messages, summaries = len(self.records("role")), len(self.records("view"))
        self.show(f"In the .jsonl: all {messages} messages, word for word; summaries: {summaries}.")
        sent = " ".join(json.dumps(request.messages) for request in self.api.requests)
        if address := re.search(r"whole output in (\S+\.txt)\]", sent):
            lines = (self.project / address[1]).read_text().splitlines()
            self.show("One of the forgotten outputs, by the address in its line:")
            self.show(f"$ cat {address[1]}")
            for line in (*lines[:2], f"... {len(lines) - 4} more lines", *lines[-2:]):
                self.show("  " + line)
        print(f"\n{len(self.api.requests)} requests, {len(self.api.refused)} of them invalid.")


def environment(url: str) -> dict[str, str]:
    """For the agent: nothing but the tour's settings, and no proxy in between."""
    own = re.compile("(?i)(anthropic|agent|model)_.*|.*_proxy|pythonunbuffered")
    kept = {name: value for name, value in os.environ.items() if not own.fullmatch(name)}
    return {**kept, **LIMITS, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "no-key-needed"}


def make_project(folder: Path) -> None:
    for name, content in FILES.items():
        (folder / name).write_text(content)


def main() -> int:
    script: Any = model()
    with tempfile.TemporaryDirectory() as folder, MessagesAPI(script) as api:
        tour = Tour(Path(folder).resolve(), api, "--step" in sys.argv[1:])
        make_project(tour.project)
        print(
            "A tour of agent.py. Agent, tools and files are real; only the model is a script.\n"
            f"The context, all that the model sees, may have {LIMITS['AGENT_THRESHOLD']} tokens "
            "(else 100,000).\n"
        )
        tour.show(f"The task: {TASK}", "")
        command = [
            sys.executable,
            "-u",
            str(AGENT),
            "-y",
            "-p",
            TASK,
        ]  # -u: what it prints comes at once
        with subprocess.Popen(
            command,
            cwd=tour.project,
            env=environment(api.url),
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as agent:
            assert agent.stdout
            for line in agent.stdout:
                tour.line(line.rstrip("\n"))
        tour.end()
        return agent.returncode or len(api.refused)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nInterrupted.")
    except BrokenPipeError:  # nobody reads on, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
