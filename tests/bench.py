"""Figures: is forgetting worth it? Conversations are played through the real agent; only the model is scripted.

    python tests/bench.py               conversations made here, from a seed
    python tests/bench.py PATH...       recorded ones: NAME.jsonl.gz, or directories of them, with the pauses
                                        of requests.json beside them where there is one
    python tests/bench.py --quick       fewer of them, and shorter measurements
    python tests/bench.py --json        the same figures for a program

    1 Conversations             3 The price of a request    5 The comparison    7 Start-up, work, memory
    2 The model that replays    4 The policies              6 Planted facts     8 What is printed

A recorded conversation can't answer what the model would have done with less in its context. What can be
counted is what a request would have cost, and how often the next step needed a text that was gone.
"""
from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from messages_api import SUMMARY_MARK  # noqa: E402

import agent  # noqa: E402

Block = dict[str, Any]
Message = dict[str, Any]

# ================================ 1  Conversations ================================
# A step is one request: what the user typed before it, the pause before it, the reply, the results of its
# calls. A call to a tool that the agent doesn't have becomes a bash call of the same length.

@dataclass
class Step:
    said: str = ""
    pause: float = 10.0     # seconds since the request before; 10 where that was not recorded
    reply: list[Block] = field(default_factory=list)
    results: list[tuple[str, bool]] = field(default_factory=list)   # text, is_error

@dataclass
class Conversation:
    name: str
    steps: list[Step]

    @property
    def source(self) -> str:
        return self.name.rpartition("-")[0]

SCHEMAS: dict[str, Any] = {tool["name"]: tool["input_schema"] for tool in agent.TOOLS}
KINDS: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
SIGNATURE = "c2lnbmF0dXJl" * 20   # about what the proof of an empty thinking block weighs

def read_conversation(path: Path) -> Conversation:
    """A recorded conversation with its pauses."""
    name, beside = path.name.partition(".")[0], path.parent / "requests.json"
    known = json.loads(beside.read_text()).get(name, {}) if beside.exists() else {}
    pauses = known.get("seconds_before_request") or []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return Conversation(name, steps_of([json.loads(line) for line in lines], pauses))

def steps_of(messages: list[Message], pauses: list[float | None]) -> list[Step]:
    steps: list[Step] = []
    said = ""
    for message in messages:
        content = message["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] == "assistant":
            pause = pauses[len(steps)] if len(steps) < len(pauses) else None
            steps.append(Step(said, 10.0 if pause is None else pause, reply_of(content, len(steps))))
            said = ""
            continue
        for result in content:
            if result["type"] == "tool_result":
                steps[-1].results.append((agent_text(result), result.get("is_error", False)))
        said = "\n\n".join(b["text"] for b in content if b["type"] == "text" and b["text"].strip())
    for step in steps:   # a command that fails is no error of the tool: the agent says so by its exit status
        names = [block["name"] for block in step.reply if block["type"] == "tool_use"]
        step.results = [(text, bad and name != "bash") for (text, bad), name in zip(step.results, names)]
    return [step for step in steps if step.reply]

def reply_of(content: list[Block], number: int) -> list[Block]:
    """A reply as a current model gives it: its thinking, of which only the proof comes, then what was recorded."""
    texts = [block for block in content if block["type"] == "text" and block["text"].strip()]
    calls = [fitting(block) | {"id": f"call_{number}_{i}"}
             for i, block in enumerate(b for b in content if b["type"] == "tool_use")]
    thought = {"type": "thinking", "thinking": "", "signature": f"{number:06}{SIGNATURE}"}
    return [thought, *texts, *calls] if texts or calls else []

def fitting(call: Block) -> Block:
    """The call as one of the agent's own tools would get it."""
    schema: Any = SCHEMAS.get(call["name"])
    if schema and call["name"] != "compact":
        kinds: dict[str, Any] = {name: KINDS[row["type"]] for name, row in schema["properties"].items()}
        args = {name: value for name, value in call["input"].items() if isinstance(value, kinds.get(name, ()))}
        if args.keys() >= set(schema["required"]):
            return {"type": "tool_use", "name": call["name"], "input": args}
    whole = json.dumps({call["name"]: call["input"]}, ensure_ascii=False)
    return {"type": "tool_use", "name": "bash", "input": {"command": whole}}

def agent_text(block: Block) -> str:
    content: Any = block.get("content", block.get("text", ""))
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)

# Made conversations have the sizes of recorded ones: a result has 85 tokens in the median and 12,600 in the
# 99th percentile, results are about 68 % of the context, 60 % of the readings are of a file read before.

MEDIAN, SPREAD, LONGEST = 85 * 3, 2.15, 200_000   # characters; sigma of a log-normal distribution
WORDS = ["value", "index", "parse", "error", "node", "path", "return", "state", "test", "buffer", "request", "open",
         "close", "line", "token", "write", "read", "merge", "cache", "limit", "offset", "handle", "result", "config"]

class Maker:
    """A seeded source of conversations about a project whose files exist only in here."""
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.files: dict[str, str] = {}
        self.read: list[str] = []

    def text(self, size: float) -> str:
        """About `size` characters, in lines; no two lines are the same."""
        lines, left = [], size
        while left > 0:
            indent, count = " " * self.chance.choice((0, 4, 8)), self.chance.randint(3, 12)
            words = " ".join(self.chance.choices(WORDS, k=count))
            lines.append(f"{indent}{words} {self.chance.randrange(16 ** 6):06x}")
            left -= len(lines[-1]) + 1
        return "\n".join(lines)

    def size(self, scale: float = 1.0) -> float:
        return min(MEDIAN * scale * self.chance.lognormvariate(0, SPREAD), LONGEST)

    def conversation(self, name: str) -> Conversation:
        """10 to 450 requests, as recorded; a new prompt of the user about every 15."""
        count = int(min(max(self.chance.lognormvariate(4.4, 0.9), 10), 450))
        messages: list[Message] = [{"role": "user", "content": self.text(800)}]
        pauses: list[float | None] = []
        for number in range(count):
            answers = bool(pauses) and self.chance.random() < 1 / 15 and number < count - 1
            typed = isinstance(messages[-1]["content"], str)
            pauses.append(self.chance.lognormvariate(4.4, 1.3) if typed else self.chance.lognormvariate(1.8, 0.8))
            if answers and not typed:
                messages += [{"role": "assistant", "content": self.text(900)},
                             {"role": "user", "content": self.text(150)}]
            else:
                messages += self.work()
        return Conversation(name, steps_of(messages, pauses))

    def work(self) -> list[Message]:
        """One reply with one or several calls, and their results."""
        calls, results = [], []
        for _ in range(self.chance.choices((1, 2, 4, 8), (80, 12, 6, 2))[0]):
            name, args, result = self.call()
            calls.append({"type": "tool_use", "id": "", "name": name, "input": args})
            results.append({"type": "tool_result", "tool_use_id": "", "content": result})
        said = [{"type": "text", "text": self.text(self.chance.expovariate(1 / 250))}]
        return [{"role": "assistant", "content": said + calls}, {"role": "user", "content": results}]

    def call(self) -> tuple[str, dict[str, Any], str]:
        kind = self.chance.choices(("bash", "read", "edit", "write"), (52, 27, 18, 3))[0]
        if kind == "edit" and self.read:
            return self.edit(self.chance.choice(self.read[-6:]))
        if kind == "bash" or kind == "edit":
            return "bash", {"command": self.text(self.chance.expovariate(1 / 200))}, self.text(self.size(0.6))
        if kind == "read" and self.read and self.chance.random() < 0.6:
            path = self.chance.choice(self.read[-8:])
        else:
            path = f"src/{self.chance.choice(WORDS)}_{len(self.files)}.py"
            self.files[path] = self.text(max(min(self.size(8.0), 60_000), 200))
        self.read.append(path)
        if kind == "write":
            return "write_file", {"path": path, "content": self.files[path]}, "written"
        return "read_file", {"path": path}, self.files[path][:LONGEST]

    def edit(self, path: str) -> tuple[str, dict[str, Any], str]:
        """Replace a few lines of a file that was read not long ago."""
        lines = self.files[path].split("\n")
        shown = self.files[path].count("\n", 0, 12_000)   # of a long file only the beginning is shown
        start = self.chance.randrange(shown + 1)
        old, new = "\n".join(lines[start : start + 6]), self.text(self.chance.expovariate(1 / 500))
        self.files[path] = self.files[path].replace(old, new, 1)
        return "edit_file", {"path": path, "old_text": old, "new_text": new}, "Edited."

def make_conversations(count: int) -> list[Conversation]:
    return [Maker(seed).conversation(f"made-{seed:02}") for seed in range(1, count + 1)]

# ================================ 2  The model that replays ================================
# It stands where the SDK's client would: the agent sends it requests and gets the recorded replies.

SUMMARY_TOKENS = 1_500
SUMMARY = "\n".join(f"- note {n}: what was done here and what it led to, in about as many words" for n in range(58))

class Event(dict[str, Any]):
    """A dict whose fields are attributes, too, and which can be turned into data, as the SDK's objects can."""
    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return Event(value) if isinstance(value, dict) else value

    def to_dict(self, **options: Any) -> Block:
        return dict(self)

EMPTY: dict[str, Block] = {"text": {"text": ""}, "thinking": {"signature": ""}, "tool_use": {"input": {}}}

class Stream:
    """One reply as events: each block comes in one piece."""
    def __init__(self, content: list[Block], usage: dict[str, int]) -> None:
        calls = any(block["type"] == "tool_use" for block in content)
        self.content, self.usage, self.stop = content, usage, "tool_use" if calls else "end_turn"

    def __enter__(self) -> Stream:  # noqa: PYI034 - `Self` is younger than Python 3.10
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Iterator[Event]:
        start: Block = {"role": "assistant", "content": [], "stop_reason": None, "usage": self.usage}
        yield Event(type="message_start", message=start)
        for at, block in enumerate(self.content):
            yield Event(type="content_block_start", index=at, content_block=block | EMPTY[block["type"]])
            for delta in deltas(block):
                yield Event(type="content_block_delta", index=at, delta=delta)
            yield Event(type="content_block_stop", index=at)
        yield Event(type="message_delta", delta={"stop_reason": self.stop}, usage={"output_tokens": 1})
        yield Event(type="message_stop")

def deltas(block: Block) -> list[Block]:
    if block["type"] == "text":
        return [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return [{"type": "signature_delta", "signature": block["signature"]}]
    return [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]

class Player:
    """The client of a session: plays the step that is set, and has each request entered in the ledger."""
    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger, self.messages = ledger, self
        self.step = Step()
        self.left: list[tuple[str, bool]] = []   # results of the step's calls that are still to come
        self.summary = SUMMARY

    def create(self, **params: Any) -> Stream:
        messages = params["messages"]
        wanted = agent_text(messages[-1]["content"][-1]) if messages else ""
        summary = SUMMARY_MARK in wanted
        usage = self.ledger.enter(messages, None if summary else self.step) if self.ledger else {}
        if summary:
            return Stream([{"type": "text", "text": self.summary}], usage)
        self.left = list(self.step.results)
        return Stream(self.step.reply, usage)

def replay_result(session: agent.Session, **args: Any) -> str:
    """Stands for every tool: the recorded result of the call whose turn it is."""
    text, is_error = session.client.left.pop(0)
    if is_error:
        raise ValueError(text)
    return str(text)

@contextmanager
def scripted_session(player: Player, **settings: Any) -> Iterator[agent.Session]:
    """A session of the real agent in an empty directory, with the player as its model and for its tools."""
    real, agent.WAITS = dict(agent.TOOL_HANDLERS), (0, 0, 0)   # a fault of the replay shows at once
    agent.TOOL_HANDLERS.update({name: replay_result for name in real if name != "compact"})
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield agent.Session(agent.Settings(api_key="none", max_turns=1, **settings), client=player,
                                allow=lambda name, args: "", cwd=Path(folder))
    finally:
        agent.TOOL_HANDLERS.update(real)

def play(session: agent.Session, step: Step) -> None:
    """One turn of the agent's loop, which then says that it stops after the one turn that is allowed."""
    session.client.step = step
    if step.said:
        session.add("user", step.said)
    session.last_reply -= step.pause
    try:
        agent.agent_loop(session)
    except agent.Stopped as stop:
        if "AGENT_MAX_TURNS" not in str(stop):
            raise

# ================================ 3  The price of a request ================================
# In tokens at the price of one uncached token of input. An entry of the cache exists only where an earlier
# request ended; it is looked for at most 20 blocks back, and lost five minutes after its last use.

READ, WRITE, OUTPUT = 0.1, 1.25, 5.0
LOOK_BACK, LIFETIME = 20, 300
PARTS = {"read": "read from the cache", "new": "written the first time", "again": "written again after forgetting",
         "cold": "written again as the cache was cold", "summary": "for summaries"}
TOKENS_PER_BYTE = 0.35      # mixed tool output has 2.85 characters a token
NUMBER = re.compile(r"(?m)^ *\d+(?:→|\t|: ?|\| ?)")   # of a line, as some readers print it

def key_of(block: Block) -> tuple[str, ...]:
    """What tells a block from another one; ids and signatures are unique in a conversation."""
    kind = block["type"]
    if kind == "tool_use":
        return kind, block["id"], json.dumps(block["input"], ensure_ascii=False)
    return kind, str(block.get("tool_use_id", block.get("signature", ""))), agent_text(block)

class Ledger:
    """What the requests of one conversation cost, and what was missing in them."""
    def __init__(self) -> None:
        self.entries: dict[int, float] = {}    # prefix -> when it was last used
        self.sent: set[tuple[str, ...]] = set()
        self.sizes: dict[tuple[str, ...], int] = {}
        self.readable: dict[tuple[str, ...], str] = {}
        self.cost: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.count: Counter[str] = Counter()   # "requests", "summaries", "rewritten"
        self.clock, self.largest, self.end, self.thoughts = 0.0, 0, 0, 0
        self.edits: list[bool] = []            # was the old text of the edit in the context?
        self.repeats: list[bool] = []          # was the earlier reading of the file?
        self.readings: dict[str, str] = {}     # path -> how its last reading began

    def size(self, key: tuple[str, ...]) -> int:
        if key not in self.sizes:
            self.sizes[key] = int((len("".join(key).encode("utf-8", "replace")) + 40) * TOKENS_PER_BYTE)
        return self.sizes[key]

    def enter(self, messages: list[Message], step: Step | None) -> dict[str, int]:
        """Enter a request of the agent; without a step it is one for a summary. Returns its usage."""
        blocks = [b for m in messages for b in
                  ([{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"])]
        keys = [("system", fixed_text()), *map(key_of, blocks)]
        self.clock += step.pause if step else 5
        read, written = self.charge(keys, step is None)
        self.largest = max(self.largest, read + written)
        if step:
            self.inspect(keys, step)
        return {"input_tokens": 0, "cache_read_input_tokens": read, "cache_creation_input_tokens": written}

    def charge(self, keys: list[tuple[str, ...]], summary: bool) -> tuple[int, int]:
        prefixes = [0]
        for key in keys:
            prefixes.append(hash((prefixes[-1], key)))
        places = [n for n in range(len(keys), max(len(keys) - LOOK_BACK, 0) - 1, -1) if prefixes[n] in self.entries]
        known = places[0] if places else 0
        warm = next((n for n in places if self.clock - self.entries[prefixes[n]] <= LIFETIME), 0)
        for n in {warm, len(keys)} - {0}:
            self.entries[prefixes[n]] = self.clock
        self.count["summaries" if summary else "requests"] += 1
        if not summary:
            self.count["rewritten"] += bool(self.end and self.end not in prefixes)
            self.end = prefixes[-1]
        sizes = [self.size(key) for key in keys]
        self.book(keys, sizes, warm, known, summary)
        return sum(sizes[:warm]), sum(sizes[warm:])

    def book(self, keys: list[tuple[str, ...]], sizes: list[int], warm: int, known: int, summary: bool) -> None:
        """Enter what was read and written, by its reason."""
        self.cost["summary" if summary else "read"] += READ * sum(sizes[:warm])
        self.cost["summary"] += OUTPUT * SUMMARY_TOKENS if summary else 0
        for n in range(warm, len(keys)):
            again = "cold" if n < known else "again" if keys[n] in self.sent else "new"
            self.cost["summary" if summary else again] += WRITE * sizes[n]
        self.sent.update(keys[warm:])

    def inspect(self, keys: list[tuple[str, ...]], step: Step) -> None:
        """Could the reply that was recorded have been given to this request?"""
        thoughts = sum(key[0] == "thinking" for key in keys)
        self.count["thoughts lost"] += max(self.thoughts - thoughts, 0)
        self.thoughts = thoughts + 1   # and that of the reply
        results = iter(step.results)
        for call in (block for block in step.reply if block["type"] == "tool_use"):
            path, result = str(call["input"].get("path", "")), next(results, ("", True))
            if call["name"] == "edit_file" and call["input"]["old_text"].strip():
                self.edits.append(self.stands(call["input"]["old_text"].strip(), keys))
            if call["name"] == "read_file" and not result[1]:
                if path in self.readings:
                    self.repeats.append(self.stands(self.readings[path], keys))
                self.readings[path] = NUMBER.sub("", result[0]).strip()[:200]

    def stands(self, text: str, keys: list[tuple[str, ...]]) -> bool:
        return any(text in self.plain(key) for key in reversed(keys))

    def plain(self, key: tuple[str, ...]) -> str:
        """The text of a block without the numbers of its lines; of a call all its arguments."""
        if key not in self.readable:
            last = "\n".join(map(str, json.loads(key[-1]).values())) if key[0] == "tool_use" else key[-1]
            self.readable[key] = NUMBER.sub("", last) if key[0] in ("tool_result", "text") else last
        return self.readable[key]

@cache
def fixed_text() -> str:
    """About what the system prompt and the tools weigh, the same for every policy."""
    return json.dumps(agent.TOOLS) + "." * 1200

# ================================ 4  The policies ================================
# The agent is the real one. So is the lesson's first layer, which is micro_compact with its default
# arguments. Of the lesson's second layer, which the agent no longer has, this is the whole.

LESSON_THRESHOLD, LESSON_EXCERPT = 50_000, 80_000   # tokens; characters that the lesson has summarised
NEVER = 10 ** 9

def play_agent(conversation: Conversation, **settings: Any) -> Ledger:
    ledger = Ledger()
    with scripted_session(Player(ledger), **settings) as session:
        for step in conversation.steps:
            play(session, step)
    return ledger

def play_plain(conversation: Conversation, forget: Callable[[list[Message], Ledger], list[Message]]) -> Ledger:
    """Play without the agent's loop: `forget` says before each request what is left of the messages."""
    ledger = Ledger()
    messages: list[Message] = []
    for step in conversation.steps:
        if step.said:
            add(messages, [{"type": "text", "text": step.said}])
        messages = forget(messages, ledger)
        ledger.enter(messages, step)
        messages.append({"role": "assistant", "content": step.reply})
        calls = [block["id"] for block in step.reply if block["type"] == "tool_use"]
        add(messages, [{"type": "tool_result", "tool_use_id": call, "content": text or "(no output)"}
                       | ({"is_error": True} if bad else {}) for call, (text, bad) in zip(calls, step.results)])
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
    return agent.micro_compact(messages)

def lesson_both(messages: list[Message], ledger: Ledger) -> list[Message]:
    """Over the threshold a summary of the beginning, asked for in a request of its own, takes the place of all."""
    messages = agent.micro_compact(messages)
    if agent.estimate_tokens(messages) <= LESSON_THRESHOLD:
        return messages
    excerpt = json.dumps(messages, ensure_ascii=False)[:LESSON_EXCERPT].encode("utf-8", "replace")
    ledger.cost["summary"] += len(excerpt) * TOKENS_PER_BYTE + OUTPUT * SUMMARY_TOKENS
    ledger.count["summaries"] += 1
    return [{"role": "user", "content": [{"type": "text", "text": SUMMARY}]}]

POLICIES: dict[str, Callable[[Conversation], Ledger]] = {
    "no compaction": lambda c: play_plain(c, keep_all),
    "results capped, no more": lambda c: play_agent(c, threshold=0, clear_at_least=NEVER, keep_recent=NEVER),
    "lesson: layer 1": lambda c: play_plain(c, lesson_one),
    "lesson: layers 1 and 2": lambda c: play_plain(c, lesson_both),
    "ours": lambda c: play_agent(c),
}
NOTHING, OURS = "no compaction", "ours"

# ================================ 5  The comparison ================================

@dataclass
class Played:
    """One conversation under one policy, in figures."""
    name: str
    source: str
    cost: float
    parts: dict[str, float]
    requests: int
    largest: int
    edits: list[bool]
    repeats: list[bool]
    clearings: int
    summaries: int
    thoughts_lost: int

def play_one(job: tuple[Conversation, str]) -> Played:
    conversation, policy = job
    ledger = POLICIES[policy](conversation)
    count, cost = ledger.count, sum(ledger.cost.values())
    return Played(conversation.name, conversation.source, cost, dict(ledger.cost), count["requests"], ledger.largest,
                  ledger.edits, ledger.repeats, max(count["rewritten"] - count["summaries"], 0), count["summaries"],
                  count["thoughts lost"])

def compare(conversations: list[Conversation], policies: list[str]) -> dict[str, list[Played]]:
    """Each conversation under each policy, on all processors."""
    jobs = [(conversation, policy) for policy in policies for conversation in conversations]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        played = list(pool.map(play_one, jobs))
    size = len(conversations)
    return {policy: played[n * size : (n + 1) * size] for n, policy in enumerate(policies)}

def ratio(part: list[Played], whole: list[Played]) -> float:
    return sum(p.cost for p in part) / max(sum(p.cost for p in whole), 1)

def lost(now: list[bool], then: list[bool]) -> int:
    """How many stood in the context when recorded and don't any more."""
    return sum(before and not after for after, before in zip(now, then))

def figures(played: list[Played], base: list[Played]) -> dict[str, Any]:
    """One line of the table."""
    ratios = [p.cost / b.cost for p, b in zip(played, base)]
    edits, repeats = sum(sum(b.edits) for b in base), sum(sum(b.repeats) for b in base)
    blind = sum(lost(p.edits, b.edits) for p, b in zip(played, base))
    again = sum(lost(p.repeats, b.repeats) for p, b in zip(played, base))
    return {"sum": ratio(played, base), "median": statistics.median(ratios), "worst": max(ratios),
            "dearer": sum(r > 1.0005 for r in ratios), "blind": blind, "edits": edits,
            "rereads": again, "repeats": repeats, "largest": max(p.largest for p in played),
            "clearings": sum(p.clearings for p in played), "summaries": sum(p.summaries for p in played),
            "thoughts_lost": sum(p.thoughts_lost for p in played), "requests": sum(p.requests for p in played)}

def by_source(played: list[Played], base: list[Played]) -> dict[str, dict[str, Any]]:
    """Each source alone, and all the others without it: what a figure owes to one of them."""
    pairs, found = list(zip(played, base)), {}
    for source in sorted({p.source for p in played}):
        own = [pair for pair in pairs if pair[0].source == source]
        rest = [pair for pair in pairs if pair[0].source != source] or own
        found[source] = {"own": figures(*map(list, zip(*own))), "rest": figures(*map(list, zip(*rest)))}
    return found

# ================================ 6  Planted facts ================================
# Marks are planted where a conversation has its facts, and the summariser drops them all. Afterwards a mark
# is still in the context, or one command finds it in a file that the context names, or it is gone.

PLACES = ("user: first rule", "user: later rule", "user: long paste", "early result", "early long result",
          "middle result", "middle long result", "late result", "late long result", "path read", "path edited",
          "command", "reply")
ADDRESS = re.compile(r"\.transcripts/[\w-]+(?:\.jsonl|/[\w-]+\.txt)?")

def plant(maker: Maker) -> list[Step]:
    """Nine steps that hold the marks, early ones first."""
    marks = {place: f"MARK{n:02}q" for n, place in enumerate(PLACES)}

    def step(said: str, text: str, calls: list[tuple[str, Block, str]]) -> Step:
        content = [{"type": "text", "text": text}] + [{"type": "tool_use", "name": n, "input": a} for n, a, _ in calls]
        return Step(said, 10.0, content, [(result, False) for _, _, result in calls])

    def long(mark: str) -> str:
        return f"{maker.text(30_000)}\n{mark}\n{maker.text(30_000)}"

    steps = [step(f"Do it. Rule: never touch {marks['user: first rule']}.", "Well.", [
                 ("bash", {"command": "one"}, marks["early result"])]),
             step("", "On.", [("bash", {"command": "two"}, long(marks["early long result"]))]),
             step(f"Rule: keep {marks['user: later rule']}.", f"Noted {marks['reply']}.",
                  [("read_file", {"path": marks["path read"] + ".py"}, maker.text(3000)),
                   ("bash", {"command": f"make {marks['command']}"}, maker.text(2000))]),
             step("", "On.", [("bash", {"command": "three"}, f"{maker.text(3000)} {marks['middle result']}")]),
             step("", "On.", [("bash", {"command": "four"}, long(marks["middle long result"]))]),
             step(long(marks["user: long paste"]), "Edit.", [
                 ("edit_file", {"path": marks["path edited"] + ".py", "old_text": "a", "new_text": "b"}, "Edited.")]),
             step("", "On.", [("bash", {"command": "five"}, long(marks["late long result"]))]),
             step("", "On.", [("bash", {"command": "six"}, marks["late result"])])]
    return steps

def find(session: agent.Session, mark: str, context: str) -> str:
    """Where a mark is: one grep, run by the agent's own tool, for each file or directory that the context names."""
    if mark in context:
        return "in"
    for address in sorted(set(ADDRESS.findall(context))):
        if (session.cwd / address).exists() and mark in agent.run_bash(session, f"grep -rhom1 {mark} {address}"):
            return "one call"
    return "gone"

def probe(quick: bool) -> dict[str, list[str]]:
    """Where each fact is after one, three and ten compactions."""
    maker, found = Maker(0), {place: list[str]() for place in PLACES}
    player = Player()
    player.summary = "Nothing to report."
    with scripted_session(player, threshold=100_000) as session:
        for number, step in enumerate(plant(maker)):
            step.reply = reply_of(step.reply, number)
            play(session, step)
        for compaction in range(1, 11):
            agent.auto_compact(session)
            if compaction in (1, 3, 10):
                context = json.dumps(session.messages, ensure_ascii=False)
                for n, place in enumerate(PLACES):
                    found[place].append(find(session, f"MARK{n:02}q", context))
            for step in steps_of([m for _ in range(8) for m in maker.work()], []):
                for block in step.reply:
                    block |= {"id": f"{block['id']}_{compaction}"} if "id" in block else {}
                step.said = "" if step.reply[-1]["id"].split("_")[1] != "0" else maker.text(100)
                play(session, step)
    return found

# ================================ 7  Start-up, work, memory ================================

def seconds_to(marker: bytes, command: list[str]) -> float:
    """From the start of a program to the moment when its terminal shows the marker."""
    main, other = os.openpty()
    environment = os.environ | {"ANTHROPIC_API_KEY": "none", "TERM": "dumb", "PYTHONUTF8": "1"}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, cwd=folder, env=environment,
                                 start_new_session=True)
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
    starts = {"python -q": (b">>> ", [python, "-q"]), "agent.py, to the prompt": (b"agent >> ", [python, program]),
              "agent.py --help": (b"--version", [python, program, "--help"]),
              'python -c "import anthropic"': (b"done", [python, "-c", "import anthropic; print('done')"])}
    times: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(3 if quick else 7):
        for name, (marker, command) in starts.items():
            times[name].append(seconds_to(marker, command))
    return {name: statistics.median(found) for name, found in times.items()}

def small_step(number: int, characters: int = 900) -> Step:
    """One command; the user says something at the first and at every fiftieth."""
    call = {"type": "tool_use", "name": "bash", "input": {"command": f"make {number}"}}
    reply = reply_of([{"type": "text", "text": "On."}, call], number)
    said = f"Prompt {number}: go on." if number % 50 == 1 else ""
    return Step(said, 10.0, reply, [("x y z " * (characters // 6), False)])

def work_by_fill(quick: bool) -> dict[str, dict[str, float]]:
    """The agent's own work in one turn, by how full the context is; also against writing it as JSON once."""
    found = {}
    for fill in (10, 50, 100):
        with scripted_session(Player(), threshold=100_000) as session:
            number = fill_up(session, fill * 930)
            turns = [timed(partial(play, session, small_step(number + i))) for i in range(5 if quick else 11)]
            dump = statistics.median(timed(partial(json.dumps, session.messages)) for _ in range(11))
        middle = statistics.median(turns)
        found[f"{fill} %"] = {"ms": middle * 1e3, "dumps": middle / dump}
    return found

def fill_up(session: agent.Session, tokens: int) -> int:
    """Put small calls and their results into the view, which layer 1 can't clear. Returns the number of the next."""
    number = 2
    session.add("user", "Begin.")
    while number % 20 or agent.estimate_tokens(session.messages) < tokens:
        step = small_step(number)
        result = {"type": "tool_result", "tool_use_id": f"call_{number}_0", "content": step.results[0][0]}
        session.add("assistant", step.reply)
        session.add("user", [result])
        number += 1
    return number

def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start

def work_by_age(quick: bool) -> dict[str, dict[str, float]]:
    """The same, with context and memory, by how long a conversation has gone on; over its last 100 turns."""
    found, sizes, chance = {}, [0], random.Random(5)
    with scripted_session(Player(), threshold=20_000) as session:
        play(session, small_step(1))   # imports the SDK
        start = time.perf_counter()
        for number in range(2, (1_000 if quick else 10_000) + 1):
            play(session, small_step(number, int(min(MEDIAN * chance.lognormvariate(0, SPREAD), 20_000))))
            sizes.append(session.tokens)
            if number % 100 == 0:
                took, start = time.perf_counter() - start, time.perf_counter()
                if number in (100, 1_000, 10_000):
                    memory = memory_now("VmRSS")
                    found[f"turn {number:,}"] = {"ms": took * 10, "tokens": max(sizes[-100:]), "mb": memory}
    return found

def memory_now(name: str) -> float:
    """Megabytes of this process: VmRSS is what it has, VmHWM the most it ever had. 0 where there is no /proc."""
    with suppress(OSError):
        if found := re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text()):
            return int(found[1]) / 1024
    return 0.0

def memory_peaks(quick: bool) -> dict[str, float]:
    """The most memory that this process, which must be new, ever had; after each thing that could take much."""
    with tempfile.TemporaryDirectory() as folder:
        session = agent.Session(agent.Settings(api_key="none"), allow=lambda name, args: "", cwd=Path(folder))
        peaks = {"before": memory_now("VmHWM")}
        agent.run_bash(session, "yes 'a line that never ends'")
        peaks["bash that prints without end"] = memory_now("VmHWM")
        with open(Path(folder) / "big", "wb") as file:
            file.truncate(2 << 30)
        tries: list[tuple[str, Callable[..., str], tuple[str, ...]]] = [
            ("read", agent.run_read, ("big",)), ("edited", agent.run_edit, ("big", "a", "b")),
            ("replaced", agent.run_write, ("big", "b"))]
        for name, tool, args in tries:
            with suppress(ValueError, OSError):   # refused, as it should be
                tool(session, *args)
            peaks[f"file of 2 GB, {name}"] = memory_now("VmHWM")
    return peaks

def in_new_process(measure: Callable[[bool], Any], quick: bool) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, quick).result()

# ================================ 8  What is printed ================================

HEAD = "  cost: sum  median  worst  dearer | blind edits    re-reads  largest | clear  sum  thoughts"

def share(part: int, whole: int) -> str:
    return f"{part:>4}/{whole:<4}{100 * part / max(whole, 1):3.0f} %"

def print_table(lines: dict[str, dict[str, Any]]) -> None:
    print(f"\n{'':>24}{HEAD}")
    for policy, f in lines.items():
        print(f"{policy:<24}  {f['sum']:9.2f}  {f['median']:6.2f}  {f['worst']:5.2f}  {f['dearer']:6} | "
              f"{share(f['blind'], f['edits'])} {share(f['rereads'], f['repeats'])} {f['largest'] // 1000:>4}k |"
              f"{f['clearings']:>6} {f['summaries']:>4}  {f['thoughts_lost']:>8}")

def print_comparison(all_played: dict[str, list[Played]], title: str) -> None:
    base, ours = all_played[NOTHING], all_played[OURS]
    print(f"Forgetting: {len(base)} {title}, {sum(p.requests for p in base):,} requests; no compaction = 1")
    print_table({policy: figures(played, base) for policy, played in all_played.items()})
    print("\nOurs, by source: alone, and all without it")
    for source, pair in by_source(ours, base).items():
        own, rest = pair["own"], pair["rest"]
        print(f"  {source:<22} {own['sum']:5.2f} / {own['median']:4.2f}  blind {own['blind']:>3}/{own['edits']:<4}"
              f"   without: {rest['sum']:5.2f} / {rest['median']:4.2f}  blind {rest['blind']:>3}/{rest['edits']}")
    print("\nOurs, the dearest against doing nothing, and of what their cost is made (%)")
    print(f"  {'':<18}{'ratio':>6}{'requests':>9}{'largest':>8}   " + "  ".join(f"{part:>7}" for part in PARTS))
    for p, b in sorted(zip(ours, base), key=lambda pair: -pair[0].cost / pair[1].cost)[:6]:
        parts = "  ".join(f"{100 * p.parts.get(part, 0) / p.cost:7.0f}" for part in PARTS)
        print(f"  {p.name:<18}{p.cost / b.cost:6.2f}{p.requests:>9}{p.largest // 1000:>7}k   {parts}")
    print("  " + "; ".join(f"{part}: {words}" for part, words in list(PARTS.items())[:2]))
    print("  " + "; ".join(f"{part}: {words}" for part, words in list(PARTS.items())[2:]))

def print_probe(found: dict[str, list[str]]) -> None:
    print(f"\n{'Planted facts, after':<24}{'1':>10}{'3':>10}{'10 compactions':>18}")
    for place, where in found.items():
        print(f"  {place:<22}{where[0]:>10}{where[1]:>10}{where[2]:>10}")

def print_measures(start: dict[str, float], fill: dict[str, Any], age: dict[str, Any], peaks: dict[str, float]) -> None:
    print("\nStart-up, against python -q")
    for name, seconds in start.items():
        print(f"  {name:<32}{seconds * 1e3:7.0f} ms {seconds / start['python -q']:7.1f} x")
    print("\nOwn work in one turn, by how full the context is; against writing it as JSON once")
    for name, f in fill.items():
        print(f"  {name:<32}{f['ms']:7.1f} ms {f['dumps']:7.1f} x")
    print("\nOwn work in one turn, by age (threshold 20,000); the last 100 turns")
    for name, f in age.items():
        print(f"  {name:<32}{f['ms']:7.1f} ms   at most {f['tokens']:,} tokens   {f['mb']:.0f} MB")
    print("\nPeak memory")
    for name, megabytes in peaks.items():
        print(f"  {name:<32}{megabytes:7.0f} MB")

def load(paths: list[Path], quick: bool) -> tuple[list[Conversation], str]:
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl.gz")) if path.is_dir() else [path])]
    if files:
        return [read_conversation(file) for file in files[:: 3 if quick else 1]], "recorded conversations"
    return make_conversations(6 if quick else 24), "made conversations (seeds 1 to n)"

def main() -> None:
    parser = argparse.ArgumentParser(description="Figures for agent.py: cost, forgetting, start-up, work, memory.")
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="recorded conversations, or directories")
    parser.add_argument("--json", action="store_true", help="for a program")
    parser.add_argument("--quick", action="store_true", help="fewer conversations, shorter measurements")
    parser.add_argument("--only-cost", action="store_true", help="only the comparison of the policies")
    options = parser.parse_args()
    conversations, title = load(options.paths, options.quick)
    all_played = compare(conversations, list(POLICIES))
    if not options.json:
        print_comparison(all_played, title)
    base = all_played[NOTHING]
    data: dict[str, Any] = {"policies": {policy: figures(played, base) for policy, played in all_played.items()},
                            "sources": by_source(all_played[OURS], base)}
    if not options.only_cost:
        data["facts"] = in_new_process(probe, options.quick)
        measures = [in_new_process(m, options.quick) for m in (measure_start, work_by_fill, work_by_age, memory_peaks)]
        data |= dict(zip(("start", "work_by_fill", "work_by_age", "memory"), measures))
        if not options.json:
            print_probe(data["facts"])
            print_measures(*measures)
    if options.json:
        json.dump(data, sys.stdout, indent=1)
        print()

if __name__ == "__main__":
    main()
