"""Figures: is forgetting worth it? Conversations are played through the real agent; only the
model is scripted.

    python tests/bench.py               conversations made here, from a seed
    python tests/bench.py PATH...       recorded ones: NAME.jsonl.gz, or directories of them, with
                                        the pauses of requests.json beside them if there is one
    python tests/bench.py --quick       fewer of them, and shorter measurements
    python tests/bench.py --json        the same figures for a program
    python tests/bench.py --figure tests/context.svg      one conversation as a picture, no more

    1 The policies      3 Planted facts                      5 The picture
    2 The comparison    4 Start-up, work, growth, memory     6 What is printed

How a conversation is played, and what a request costs, is in replay.py. What a summary loses in
understanding is not measured; therefore their number is printed.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from replay import (  # isort: skip
    MEDIAN,
    NEVER,
    OUTPUT,
    ROOT,
    SPREAD,
    SUMMARY,
    SUMMARY_TOKENS,
    Block,
    Conversation,
    Ledger,
    Maker,
    Message,
    Player,
    Step,
    agent,
    make_conversations,
    new_agent,
    play,
    read_conversation,
    reply_of,
    scripted_agent,
    size_in_tokens,
    steps_of,
)

# ================================ 1  The policies ================================
# The agent is the real one. Of the lesson that it grew from, this is the whole: see
# github.com/shareAI-lab/learn-claude-code, the lesson on context compaction.

LESSON_RECENT = 3  # results that stay
LESSON_CHARS = 100  # a shorter result stays
LESSON_THRESHOLD = 50_000  # tokens
LESSON_EXCERPT = 80_000  # characters that the lesson has summarised
FACTORS = (0.92, 0.96, 1.0, 1.04, 1.08)  # of the threshold: a single one is chance
AUTOMATIC = {"type": "ephemeral"}

Forget = Callable[[list[Message], Ledger], list[Message]]


def play_agent(conversation: Conversation, **settings: Any) -> Ledger:
    ledger = Ledger()
    with scripted_agent(Player(ledger), **settings) as a:
        for step in conversation.steps:
            play(a, step)
    return ledger


def play_plain(conversation: Conversation, forget: Forget) -> Ledger:
    """Play without the agent: `forget` says before each request what is left of the messages."""
    ledger = Ledger()
    messages: list[Message] = []
    for step in conversation.steps:
        ledger.clock += step.pause
        if step.said:
            add(messages, [agent.text_block(step.said)])
        messages = forget(messages, ledger)
        ledger.enter({"messages": messages, "cache_control": AUTOMATIC}, step)
        messages.append({"role": "assistant", "content": step.reply})
        results = []
        for call, (text, is_error) in zip(step.calls, step.results, strict=True):
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": text or "(none)"}
            results.append(result | ({"is_error": True} if is_error else {}))
        add(messages, results)
    return ledger


def add(messages: list[Message], content: list[Block]) -> None:
    """What is sent as the user: one message for neighbours."""
    if content and messages and messages[-1]["role"] == "user":
        messages[-1] = {"role": "user", "content": messages[-1]["content"] + content}
    elif content:
        messages.append({"role": "user", "content": content})


def keep_all(messages: list[Message], ledger: Ledger) -> list[Message]:
    return messages


def lesson_one(messages: list[Message], ledger: Ledger) -> list[Message]:
    """Every result but the newest three becomes one line.

    Thinking behind the first change goes: else the API refuses the request.
    """
    names = {call["id"]: call["name"] for call in agent.all_blocks(messages, "tool_use")}
    results = agent.all_blocks(messages, "tool_result")
    placeholders = {}
    for result in results[:-LESSON_RECENT]:
        if len(result["content"]) > LESSON_CHARS:
            name = result["tool_use_id"]
            placeholders[name] = f"[Previous: used {names[name]}]"
    return agent.replace_results(messages, placeholders) if placeholders else messages


def lesson_both(messages: list[Message], ledger: Ledger, threshold: float) -> list[Message]:
    """Over the threshold a summary of the beginning, asked for in a request of its own, takes the
    place of all."""
    messages = lesson_one(messages, ledger)
    if agent.estimate_tokens(messages) <= threshold:
        return messages
    excerpt = json.dumps(messages, ensure_ascii=False)[:LESSON_EXCERPT]
    ledger.cost += size_in_tokens(excerpt) + OUTPUT * SUMMARY_TOKENS
    ledger.count["summaries"] += 1
    return [{"role": "user", "content": [agent.text_block(SUMMARY)]}]


def play_lesson(conversation: Conversation, factor: float) -> Ledger:
    return play_plain(conversation, partial(lesson_both, threshold=factor * LESSON_THRESHOLD))


def play_ours(conversation: Conversation, factor: float) -> Ledger:
    return play_agent(conversation, threshold=int(factor * agent.THRESHOLD))


def play_capped(conversation: Conversation, factor: float) -> Ledger:
    return play_agent(conversation, threshold=0, clear_at_least=NEVER, keep_recent=NEVER)


NOTHING, OURS = "no compaction", "ours"
POLICIES: dict[str, Callable[[Conversation, float], Ledger]] = {
    NOTHING: lambda conversation, factor: play_plain(conversation, keep_all),
    "results capped, no more": play_capped,
    "lesson: layer 1": lambda conversation, factor: play_plain(conversation, lesson_one),
    "lesson: layers 1 and 2": play_lesson,
    OURS: play_ours,
}
WITH_THRESHOLD = ("lesson: layers 1 and 2", OURS)

# ================================ 2  The comparison ================================


@dataclass
class Played:
    """One conversation under one policy, in figures."""

    cost: float
    forced: float  # of that, for texts that were gone
    count: Counter[str]
    largest: int
    fullness: float  # the largest context / the threshold


Runs = list[list[Played]]  # one list for each threshold


def play_one(job: tuple[Conversation, str, float]) -> Played:
    conversation, policy, factor = job
    ledger = POLICIES[policy](conversation, factor)
    largest = max(ledger.contexts)
    fullness = largest / (factor * agent.THRESHOLD)
    return Played(ledger.cost, ledger.forced, ledger.count, largest, fullness)


def compare(conversations: list[Conversation], factors: tuple[float, ...]) -> dict[str, Runs]:
    """Each conversation under each policy, on two processors."""
    keys = [(p, f) for p in POLICIES for f in (factors if p in WITH_THRESHOLD else (1.0,))]
    jobs = [(c, policy, factor) for policy, factor in keys for c in conversations]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        played = list(pool.map(play_one, jobs))
    runs: dict[str, Runs] = {policy: [] for policy in POLICIES}
    for n, (policy, _) in enumerate(keys):
        runs[policy].append(played[n * len(conversations) : (n + 1) * len(conversations)])
    return runs


def figures(runs: Runs, base: list[Played]) -> dict[str, float]:
    """One line of the table: means over the runs; the largest of what must not happen."""
    ratios = [[p.cost / b.cost for p, b in zip(played, base, strict=True)] for played in runs]
    whole = sum(b.cost for b in base)
    flat = [p for played in runs for p in played]

    def per_run(name: str) -> float:
        return sum(p.count[name] for p in flat) / len(runs)

    return {
        "sum": sum(p.cost for p in flat) / len(runs) / whole,
        "median": statistics.fmean(statistics.median(row) for row in ratios),
        "worst": max(max(row) for row in ratios),
        "dearer": sum(statistics.fmean(column) > 1.0005 for column in zip(*ratios, strict=True)),
        "without_look_ups": sum(p.cost - p.forced for p in flat) / len(runs) / whole,
        "blind": 100 * per_run("blind") / max(per_run("edits"), 1),
        "look_ups": 100 * per_run("look-ups") / per_run("requests"),
        "largest": max(p.largest for p in flat),
        "fullness": max(p.fullness for p in flat),
        "clearings": max(per_run("rewritten") - per_run("summaries"), 0),
        "summaries": per_run("summaries"),
    }


# ================================ 3  Planted facts ================================
# Marks are planted where a conversation has its facts, and the summariser drops them all. Then a
# mark is still in the context, or one command finds it in a file that the context names, or it is
# gone.

PLACES = (
    "user: first rule, user: later rule, user: long paste, early result, early long result, "
    "middle result, middle long result, late result, late long result, path read, path edited, "
    "command, reply"
).split(", ")
MARKS = {place: f"MARK{n:02}q" for n, place in enumerate(PLACES)}
ADDRESS = re.compile(r"\.transcripts/[\w-]+(?:\.jsonl|/[\w-]+\.txt)?")
COMPACTIONS = (1, 3, 10)


def plant(maker: Maker) -> list[Step]:
    """Eight steps that hold the marks, early ones first."""

    def step(said: str, text: str, *calls: tuple[str, Block, str]) -> Step:
        content = [agent.text_block(text)]
        content += [{"type": "tool_use", "name": name, "input": args} for name, args, _ in calls]
        return Step(said, reply=content, results=[(result, False) for _, _, result in calls])

    def long(mark: str) -> str:
        return f"{maker.text(30_000)}\n{mark}\n{maker.text(30_000)}"

    def bash(command: str, result: str) -> tuple[str, Block, str]:
        return "bash", {"command": command}, result

    marks = MARKS
    read = {"path": marks["path read"] + ".py"}
    edited = {"path": marks["path edited"] + ".py", "old_text": "a", "new_text": "b"}
    noted = [
        ("read_file", read, maker.text(3_000)),
        bash(f"make {marks['command']}", maker.text(2_000)),
    ]
    return [
        step(f"Rule: no {marks['user: first rule']}.", "Well.", bash("one", marks["early result"])),
        step("", "On.", bash("two", long(marks["early long result"]))),
        step(f"Rule: keep {marks['user: later rule']}.", f"Noted {marks['reply']}.", *noted),
        step("", "On.", bash("three", f"{maker.text(3_000)} {marks['middle result']}")),
        step("", "On.", bash("four", long(marks["middle long result"]))),
        step(long(marks["user: long paste"]), "Edit.", ("edit_file", edited, "Edited.")),
        step("", "On.", bash("five", long(marks["late long result"]))),
        step("", "On.", bash("six", marks["late result"])),
    ]


def find(a: agent.Agent, mark: str, context: str) -> str:
    """Where a mark is: one grep, run by the agent's own tool, for each address in the context."""
    if mark in context:
        return "in"
    a.running = {"id": "search"}
    for address in sorted(set(ADDRESS.findall(context))):
        if (a.workspace.root / address).exists():
            if mark in agent.bash(a, f"grep -rhom1 {mark} {address}"):
                return "one call"
    return "gone"


def probe(quick: bool) -> dict[str, list[str]]:
    """Where each fact is after one, three and ten compactions."""
    maker = Maker(0)
    found: dict[str, list[str]] = {place: [] for place in PLACES}
    player = Player()
    player.summary = "Nothing to report."
    with scripted_agent(player) as a:
        for number, step in enumerate(plant(maker)):
            step.reply = reply_of(step.reply, number)
            play(a, step)
        for compaction in range(1, COMPACTIONS[-1] + 1):
            a.auto_compact()
            if compaction in COMPACTIONS:
                context = json.dumps(a.messages, ensure_ascii=False)
                for place in PLACES:
                    found[place].append(find(a, MARKS[place], context))
            steps = steps_of([message for _ in range(8) for message in maker.work()], [])
            steps[0].said = maker.text(100)
            for step in steps:
                play(a, step)
    return found


# ================================ 4  Start-up, work, growth, memory ===============================

STREAMS = ("stdin", "stdout", "stderr")
BARE = "import json, os, re, subprocess, readline; input('ready >> ')"


def seconds_to(marker: bytes, command: list[str]) -> float:
    """From the start of a program to the moment when its terminal shows the marker."""
    main, other = os.openpty()
    env = os.environ | {"ANTHROPIC_API_KEY": "none", "TERM": "dumb", "PYTHONUTF8": "1"}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        child = subprocess.Popen(
            command, cwd=folder, env=env, start_new_session=True, **dict.fromkeys(STREAMS, other)
        )
        os.close(other)
        shown = b""
        with suppress(OSError):
            while marker not in shown and (piece := os.read(main, 4096)):
                shown += piece
        took = time.perf_counter() - start
        child.kill()
        child.wait()
        os.close(main)
    if marker not in shown:
        raise RuntimeError(f"{command} showed {shown[-300:]!r}")
    return took


def measure_start(quick: bool) -> dict[str, float]:
    """The median of several starts, in turns, so that a busy moment meets all of them."""
    python, program = sys.executable, str(ROOT / "agent.py")
    starts = {
        "a script with its imports": (b"ready >> ", [python, "-c", BARE]),
        "agent.py, to the prompt": (b"agent >> ", [python, program]),
        "agent.py --help": (b"--version", [python, program, "--help"]),
        "import anthropic": (b"done", [python, "-c", "import anthropic; print('done')"]),
    }
    times: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(3 if quick else 9):
        for name, (marker, command) in starts.items():
            times[name].append(seconds_to(marker, command))
    return {name: statistics.median(found) for name, found in times.items()}


def small_step(number: int, characters: int = 280) -> Step:
    """One command; the user says something at the first and at every fiftieth."""
    call = {"type": "tool_use", "name": "bash", "input": {"command": f"make {number}"}}
    reply = reply_of([agent.text_block("On."), call], number)
    said = f"Prompt {number}: go on." if number % 50 == 1 else ""
    return Step(said, reply=reply, results=[("x y z " * (characters // 6), False)])


def work_by_fill(quick: bool) -> dict[str, dict[str, float]]:
    """The agent's own work in one turn, by how full the context is; also against writing it as
    JSON once."""
    found = {}
    for fill in (10, 50, 90):
        with scripted_agent(Player(), threshold=100_000) as a:
            number = fill_up(a, fill * 1_000)
            play(a, small_step(number))  # imports the SDK
            count = 5 if quick else 11
            turns = [timed(play, a, small_step(number + 1 + i)) for i in range(count)]
            dump = statistics.median(timed(json.dumps, a.messages) for _ in range(11))
        middle = statistics.median(turns)
        found[f"{fill} % full"] = {"ms": middle * 1e3, "dumps": middle / dump}
    return found


def fill_up(a: agent.Agent, tokens: int) -> int:
    """Put small calls and their results into the view, which layer 1 leaves alone. Returns the
    number of the next."""
    number = 2
    a.begin("Begin.", "")
    while number % 20 or a.budget.count(a.messages) < tokens:
        step = small_step(number)
        a.add("assistant", step.reply)
        a.add_result(step.calls[0], step.results[0][0])
        number += 1
    return number


def timed(action: Callable[..., object], *args: Any) -> float:
    """Seconds of this process alone: a machine that is busy with other things does not count."""
    start = time.process_time()
    action(*args)
    return time.process_time() - start


def work_by_age(quick: bool) -> dict[str, dict[str, float]]:
    """The same, with context and memory, by how long a conversation has gone on; over its last 100
    turns."""
    found = {}
    sizes = []
    chance = random.Random(5)
    with scripted_agent(Player(), threshold=20_000) as a:
        play(a, small_step(1))  # imports the SDK
        start = time.process_time()
        for number in range(2, (1_000 if quick else 10_000) + 1):
            characters = int(min(MEDIAN * chance.lognormvariate(0, SPREAD), 20_000))
            play(a, small_step(number, characters))
            sizes.append(a.budget.count(a.messages))
            if number % 100 == 0:
                took, start = time.process_time() - start, time.process_time()
                if number in (100, 1_000, 10_000):
                    memory = memory_now("VmRSS")
                    tokens = max(sizes[-100:])
                    found[f"turn {number:,}"] = {"ms": took * 10, "tokens": tokens, "mb": memory}
    return found


# Steps whose time must not grow faster than their input. Each makes the input of a size, in a
# directory of its own, and returns what is to be timed.


def long_record(size: int) -> Callable[[], object]:
    """`-c` of a record with so many calls."""
    folder = tempfile.mkdtemp()
    a = new_agent(folder)
    for number in range(60 * size):
        step = small_step(number)
        a.add("assistant", step.reply)
        a.add("user", [{"type": "tool_result", "tool_use_id": f"call_{number}_0", "content": "ok"}])
    return partial(agent.resume, new_agent(folder))


def large_diff(size: int) -> Callable[[], object]:
    """A file of which every tenth line is to change, as it is shown before the question."""
    lines = [f"line {number} of {number % 7}" for number in range(3_000 * size)]
    new = [f"{line} changed" if n % 10 == 0 else line for n, line in enumerate(lines)]
    before, after = ("\n".join(text).encode() for text in (lines, new))
    change = agent.Change(Path("/file"), "file", before, after, "")
    screen = agent.Screen(notes=io.StringIO())
    return lambda: screen.preview(change.diff())


def long_old_text(size: int) -> Callable[[], object]:
    """An edit of half a file, whose lines are much alike."""
    a = new_agent(tempfile.mkdtemp())
    text = "x = 1\n" * (1_000 * size)
    old = text[len(text) // 2 :] + "end"
    (a.workspace.root / "file").write_text(text + "end\n")
    return lambda: agent.edit_file(a, "file", old, "y = 2")


def long_error(size: int) -> Callable[[], object]:
    """What a server says in place of an answer: much, and a page that never ends."""
    said = "<title> " * (100 * size) + "http://" * (100 * size) + "context of n_ctx " * (100 * size)
    error = OSError("<html>" + said)
    settings = agent.Settings(api_key="none")
    return lambda: (agent.failure_of(error, settings), agent.words_of(error))


def long_history(size: int) -> Callable[[], object]:
    """The lines of the up-arrow, read at the start."""
    path = Path(tempfile.mkdtemp()) / "history"
    path.write_text("".join(f"prompt {n}: do this\n" for n in range(1_000 * size)))
    return partial(agent.load_history, path)


STEPS: dict[str, Callable[[int], Callable[[], object]]] = {
    "-c of a long record": long_record,
    "a large diff before the question": large_diff,
    "an edit with a long old_text": long_old_text,
    "the words of an error": long_error,
    "the history at the start": long_history,
}


def measure_growth(quick: bool) -> dict[str, list[float]]:
    """Milliseconds of each step at 1, 10 and 100 times its size; the shortest of several."""
    found: dict[str, list[float]] = {}
    tempfile.tempdir = str(Path(tempfile.mkdtemp()))
    try:
        for name, make in STEPS.items():
            found[name] = []
            for size in (1, 10, 100):
                action = make(size)
                found[name].append(1e3 * shortest(action, 2 if quick else 5))
    finally:
        shutil.rmtree(tempfile.tempdir)
        tempfile.tempdir = None
    return found


def shortest(action: Callable[[], object], times: int) -> float:
    """The shortest of several times; what takes a second is not done again."""
    best = timed(action)
    while times > 1 and best < 1:
        best = min(best, timed(action))
        times -= 1
    return best


def memory_now(name: str) -> float:
    """Megabytes of this process: VmRSS is what it has, VmHWM the most it ever had. 0 where there is
    no /proc."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        if found := re.search(rf"{name}:\s+(\d+)", status):
            return int(found[1]) / 1024
    return 0.0


def memory_peaks(quick: bool) -> dict[str, float]:
    """The most memory that this process, which must be new, ever had; after each thing that could
    take much."""
    with tempfile.TemporaryDirectory() as folder:
        a = new_agent(folder)
        peaks = {"before": memory_now("VmHWM")}
        a.running = {"id": "endless"}
        agent.bash(a, "yes 'a line that never ends'")
        peaks["bash that prints without end"] = memory_now("VmHWM")
        with open(Path(folder) / "big", "wb") as file:
            file.truncate(2 << 30)
        tries: dict[str, Callable[[], object]] = {
            "read": lambda: agent.read_file(a, "big"),
            "edited": lambda: agent.edit_file(a, "big", "a", "b"),
            "replaced": lambda: agent.write_file(a, "big", "b"),
        }
        for name, action in tries.items():
            with suppress(ValueError, OSError):  # refused, as it should be
                action()
            peaks[f"file of 2 GB, {name}"] = memory_now("VmHWM")
    return peaks


def in_new_process(measure: Callable[[bool], Any], quick: bool) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, quick).result()


# ================================ 5  The picture ================================
# The size of the context over the requests of one made-up conversation. Colours follow the reader's
# own setting, light or dark.

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 210, 44, 46  # what stands around the lines
PICTURE_SEED = 46
LINES = {
    NOTHING: ("nothing forgotten", "grey"),
    "lesson: layers 1 and 2": ("the lesson", "warm"),
    OURS: ("agent.py", "cool"),
}
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.quiet { fill: #59636e }
.grid { stroke: #d1d9e0 }
.line { fill: none; stroke-width: 2; stroke-linejoin: round }
.grey { stroke: #818b98 } .warm { stroke: #bc4c00 } .cool { stroke: #0969da }
text.grey { fill: #59636e } text.warm { fill: #bc4c00 } text.cool { fill: #0969da }
text.grey, text.warm, text.cool { stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .quiet, text.grey { fill: #9198a1 }
  .grid { stroke: #3d444d }
  .grey { stroke: #9198a1 } .warm { stroke: #f0883e } .cool { stroke: #58a6ff }
  text.warm { fill: #f0883e } text.cool { fill: #58a6ff }
}"""


def draw(path: Path) -> None:
    """Play one conversation under three policies and write the picture."""
    conversation = Maker(PICTURE_SEED).conversation("picture")
    ledgers = {policy: POLICIES[policy](conversation, 1.0) for policy in LINES}
    path.write_text(picture(ledgers))
    for policy, ledger in ledgers.items():
        print(f"{LINES[policy][0]}: at most {max(ledger.contexts):,} tokens")
    print(f"{len(conversation.steps)} requests, drawn in {path}")


def picture(ledgers: dict[str, Ledger]) -> str:
    count = max(len(ledger.contexts) for ledger in ledgers.values())
    largest = max(max(ledger.contexts) for ledger in ledgers.values())
    top = -(-largest // 50_000) * 50_000  # rounded up

    def x(request: float) -> float:
        return LEFT + request / count * (WIDTH - LEFT - RIGHT)

    def y(tokens: float) -> float:
        return HEIGHT - BOTTOM - tokens / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>The size of the context over the requests of one conversation</title>",
        f"<style>{STYLE}\n</style>",
        label(LEFT - 44, 24, "Tokens in each request of one made-up conversation", "title"),
    ]
    for tokens in range(0, top + 1, max(top // 250_000, 1) * 50_000):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tokens):.1f}" '
            f'y2="{y(tokens):.1f}"/>'
        )
        parts.append(label(LEFT - 8, y(tokens) + 4, agent.short(tokens), "quiet", "end"))
    for request in range(0, count, 50 if count < 300 else 100):
        parts.append(label(x(request), HEIGHT - BOTTOM + 20, str(request), "quiet", "middle"))
    parts.append(label(x(count / 2), HEIGHT - 8, "requests", "quiet", "middle"))
    for policy, ledger in ledgers.items():
        name, color = LINES[policy]
        points = " ".join(f"{x(n):.1f},{y(size):.1f}" for n, size in enumerate(ledger.contexts))
        parts.append(f'<polyline class="line {color}" points="{points}"/>')
        words = f"{name}: cost {ledger.cost / ledgers[NOTHING].cost:.2f}"
        parts.append(label(WIDTH - RIGHT + 10, y(ledger.contexts[-1]) + 4, words, color))
    return "\n".join([*parts, "</svg>", ""])


def label(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


# ================================ 6  What is printed ================================

COLUMNS = {
    "sum": "{:.3f}",
    "median": "{:.3f}",
    "worst": "{:.2f}",
    "dearer": "{:.0f}",
    "plain sum": "{:.3f}",
    "blind %": "{:.1f}",
    "look-ups %": "{:.1f}",
    "largest": "{:,.0f}",
    "x limit": "{:.2f}",
    "clearings": "{:.0f}",
    "summaries": "{:.0f}",
}
EXPLAINED = """
  sum, median, worst: cost, all forced look-ups included; dearer: conversations that cost more than
  doing nothing; plain sum: without look-ups; blind: edits whose old text was gone; look-ups:
  requests whose reply uses two or more names that are gone; x limit: the largest context against
  the threshold"""


def print_table(lines: dict[str, dict[str, float]]) -> None:
    print(f"{'':<24}" + "".join(f"{name:>11}" for name in COLUMNS))
    for policy, row in lines.items():
        cells = [
            form.format(value) for form, value in zip(COLUMNS.values(), row.values(), strict=True)
        ]
        print(f"{policy:<24}" + "".join(f"{cell:>11}" for cell in cells))


def print_comparison(runs: dict[str, Runs], title: str) -> None:
    base = runs[NOTHING][0]
    requests = sum(p.count["requests"] for p in base)
    print(f"\n{title}: {requests:,} requests; no compaction = 1")
    print_table({policy: figures(rows, base) for policy, rows in runs.items()})


def print_probe(found: dict[str, list[str]]) -> None:
    print("\nPlanted facts, after so many compactions")
    print(f"  {'':<24}" + "".join(f"{n:>12}" for n in COMPACTIONS))
    for place, where in found.items():
        print(f"  {place:<24}" + "".join(f"{there:>12}" for there in where))


def print_measures(data: dict[str, Any]) -> None:
    first, *others = data["start"].items()
    print(f"\nStart-up, against {first[0]} that asks for input ({first[1] * 1e3:.0f} ms)")
    for name, seconds in others:
        print(f"  {name:<34}{seconds * 1e3:7.0f} ms {seconds / first[1]:7.1f} x")
    print("\nOwn work in one turn, by how full the context is; against writing it as JSON once")
    for name, row in data["work_by_fill"].items():
        print(f"  {name:<34}{row['ms']:7.1f} ms {row['dumps']:7.1f} x")
    print("\nOwn work in one turn, by age (threshold 20,000); the last 100 turns")
    for name, row in data["work_by_age"].items():
        rest = f"at most {row['tokens']:,} tokens   {row['mb']:.0f} MB"
        print(f"  {name:<34}{row['ms']:7.1f} ms   {rest}")
    print("\nGrowth: time of a step, and how often as long with 10 and 100 times the input")
    for name, (one, ten, hundred) in data["growth"].items():
        print(f"  {name:<34}{one:7.2f} ms {ten / one:7.1f} x {hundred / one:7.1f} x")
    print("\nPeak memory")
    for name, megabytes in data["memory"].items():
        print(f"  {name:<34}{megabytes:7.0f} MB")


MEASURES: dict[str, Callable[[bool], Any]] = {
    "facts": probe,
    "start": measure_start,
    "work_by_fill": work_by_fill,
    "work_by_age": work_by_age,
    "growth": measure_growth,
    "memory": memory_peaks,
}


def load(paths: list[Path], quick: bool) -> tuple[list[Conversation], str]:
    files = []
    for path in paths:
        files += sorted(path.glob("*.jsonl.gz")) if path.is_dir() else [path]
    if files:
        chosen = files[:: 3 if quick else 1]
        return [read_conversation(file) for file in chosen], f"{len(chosen)} recorded conversations"
    count = 6 if quick else 24
    return make_conversations(count), f"{count} made conversations"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Figures for agent.py.")
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="recorded ones")
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter")
    parser.add_argument("--only-cost", action="store_true", help="only compare the policies")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw one conversation")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if options.figure:
        draw(options.figure)
        return
    conversations, title = load(options.paths, options.quick)
    factors = (1.0,) if options.quick else FACTORS
    all_runs = {
        "with pauses": compare(conversations, factors),
        "without pauses": compare([c.without_pauses() for c in conversations], factors),
    }
    data: dict[str, Any] = {}
    for name, runs in all_runs.items():
        data[name] = {policy: figures(rows, runs[NOTHING][0]) for policy, rows in runs.items()}
    if not options.only_cost:
        data |= {name: in_new_process(take, options.quick) for name, take in MEASURES.items()}
    if options.json:
        print(json.dumps(data, indent=1))
        return

    if not options.only_cost:
        print_probe(data["facts"])
        print_measures(data)
    for name, runs in all_runs.items():
        print_comparison(runs, f"{title} {name}, mean of {len(factors)} thresholds")
    print(EXPLAINED)


if __name__ == "__main__":
    main()
