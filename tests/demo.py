"""An offline tour of agent.py: the real agent and real tools; only the model is scripted. No key is needed.

    python tests/demo.py            all of it, in well under a minute
    python tests/demo.py --step     waits for Enter before each step

A small project with a failing test is made in a temporary directory. A stand-in for the Messages API, on this
machine, plays a model that reads, runs the tests, edits and runs them again. The threshold is so low (3,000
tokens in place of 100,000) that each of the three layers acts once or more and says so with numbers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from messages_api import Item, MessagesAPI, Reply, Request, call, is_summary, text  # noqa: E402

AGENT = Path(__file__).resolve().parent.parent / "agent.py"
TASK = "One test of this project fails. Find out why and fix it. Rule: do not change the tests."
LIMITS = {"AGENT_THRESHOLD": "3000", "AGENT_CLEAR_AT_LEAST": "400", "AGENT_KEEP_RECENT": "1"}

STATS = '''"""Small statistics, written out."""


def mean(numbers):
    return sum(numbers) / len(numbers)


def median(numbers):
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle]
'''
TESTS = '''from stats import mean, median


def check(name, found, wanted):
    print(f"{name:40} found {found!r:>8}  wanted {wanted!r:>8}  {'ok' if found == wanted else 'FAILED'}")
    return found == wanted


if __name__ == "__main__":
    results = [check(f"mean of 1 to {n}", mean(range(1, n + 1)), (n + 1) / 2) for n in range(1, 40)]
    results += [check(f"median of 1 to {n}", median(range(1, n + 1)), (n + 1) / 2) for n in range(1, 40)]
    raise SystemExit(0 if all(results) else 1)
'''
NOTES = "\n".join(f"{n:3}. Remember to keep function number {n} short, named by a verb, and covered by a test." for n in range(1, 60))

SUMMARY = """Task: make the failing test of this project pass without changing the tests.
Done: read stats.py and notes.txt, ran test_stats.py.
Findings: median() in stats.py takes the upper middle element; for an even count it must be the mean of both.
Rules of the user: do not change the tests.
Next step: edit median() in stats.py, run python3 test_stats.py."""

FIXED = '''    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
'''

STEPS: list[tuple[str, Reply]] = [
    ("It looks around. Every message and every result goes to .transcripts/ at once.",
     Reply(text("Let me see what is here."), call("bash", {"command": "ls -l"}), call("read_file", {"path": "stats.py"}))),
    ("It runs the tests: 78 lines, most of which nobody needs twice.",
     Reply(call("bash", {"command": "python3 test_stats.py"}))),
    ("It reads on. The context fills.",
     Reply(call("read_file", {"path": "notes.txt"}))),
    ("LAYER 1, micro_compact: the old test output becomes one line that says where the whole of it is.",
     Reply(call("bash", {"command": "grep -c short notes.txt"}))),
    ("LAYER 2, auto_compact: with another long output the threshold is passed. A summary takes over.",
     Reply(call("bash", {"command": "python3 test_stats.py | grep median"}), call("bash", {"command": "cat notes.txt"}),
           call("bash", {"command": "cat test_stats.py"}))),
    ("The task goes on by itself, from the summary. It edits.",
     Reply(text("The median of an even count is wrong."),
           call("edit_file", {"path": "stats.py", "old_text": "    return ordered[middle]\n", "new_text": FIXED}))),
    ("It runs the tests again.",
     Reply(call("bash", {"command": "python3 test_stats.py && echo ALL PASS"}))),
    ("LAYER 3, the compact tool: the work is done, the model makes room by itself.",
     Reply(call("compact", {"focus": "what was wrong in stats.py"}))),
    ("And it answers.",
     Reply(text("Fixed: median() took the upper middle element; it now takes the mean of both. All tests pass."))),
]


def model(step_by_step: bool) -> object:
    """The script: the next step for each request, a summary whenever one is asked for."""
    steps = iter(STEPS)

    def answer(request: Request) -> Item:
        if is_summary(request):
            return SUMMARY
        title, reply = next(steps)
        print(f"\n--- {title}", flush=True)
        if step_by_step:
            input("    (Enter) ")
        return reply

    return answer


def show(agent: subprocess.Popen[str]) -> None:
    """Print what the agent writes, line by line."""
    assert agent.stdout
    for line in agent.stdout:
        print("    " + line.rstrip("\n"), flush=True)


def show_transcripts(project: Path) -> None:
    """What is on disk afterwards: the kinds of lines of the transcript, and the results that were kept whole."""
    print("\n--- What it remembers on disk, in .transcripts/:")
    for path in sorted((project / ".transcripts").rglob("*")):
        if path.is_file() and path.name != ".gitignore":
            print(f"    {path.relative_to(project)}  {path.stat().st_size:,} bytes")
    transcript = next((project / ".transcripts").glob("*.jsonl"))
    kinds = [re.sub(r"[^a-z_]", "", str(next(k for k in ("view", "role", "conversation") if k in json.loads(line))))
             for line in transcript.read_text().splitlines()]
    print(f"    the transcript: {len(kinds)} lines, {kinds.count('role')} messages, {kinds.count('view')} views")
    whole = transcript.read_text().count("FAILED")
    print(f"    'FAILED' stands in it {whole} times: nothing that was forgotten is lost")


def main() -> int:
    step_by_step = "--step" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, MessagesAPI(model(step_by_step)) as api:  # type: ignore[arg-type]
        project = Path(folder).resolve()
        for name, content in (("stats.py", STATS), ("test_stats.py", TESTS), ("notes.txt", NOTES)):
            (project / name).write_text(content)
        print(f"The task: {TASK}", flush=True)
        environment = {**os.environ, **LIMITS, "ANTHROPIC_BASE_URL": api.url, "ANTHROPIC_API_KEY": "no-key-needed"}
        with subprocess.Popen([sys.executable, str(AGENT), "-y", "-p", TASK], cwd=project, env=environment, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as agent:
            reader = threading.Thread(target=show, args=[agent])
            reader.start()
            status = agent.wait()
            reader.join()
        show_transcripts(project)
        print(f"\n{len(api.requests)} requests, {len(api.refused)} of them invalid.")
        return status or len(api.refused)


if __name__ == "__main__":
    sys.exit(main())
