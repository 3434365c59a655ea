"""Conversations, a client that replays them through the real agent, and what each request costs.

    1 Conversations    2 The model that replays    3 The price of a request

A recorded conversation cannot answer what the model would have done with less in its context. What
can be counted is what each request would have cost, and how often the next step needed a text that
was gone: then one more request is paid, which reads it. The summaries that are played say nothing,
while a real one names what it is about: so the look-ups are an upper bound.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from messages_api import SUMMARY_MARK  # noqa: E402

import agent  # noqa: E402

Block = dict[str, Any]
Message = dict[str, Any]

# ================================ 1  Conversations ================================
# A step is one request: what the user typed before it, the pause before it, the reply, the results
# of its calls. A call to a tool that the agent doesn't have becomes a bash call of the same length.

USUAL_PAUSE = 10.0  # seconds between two requests, where that was not recorded


@dataclass
class Step:
    said: str = ""
    pause: float = USUAL_PAUSE
    reply: list[Block] = field(default_factory=list)
    results: list[tuple[str, bool]] = field(default_factory=list)  # text, is_error

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.reply if block["type"] == "tool_use"]


@dataclass
class Conversation:
    name: str
    steps: list[Step]

    def without_pauses(self) -> Conversation:
        return Conversation(self.name, [replace(step, pause=USUAL_PAUSE) for step in self.steps])


SCHEMAS = {name: tool.description(name)["input_schema"] for name, tool in agent.TOOLS.items()}
KINDS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
SIGNATURE = "c2lnbmF0dXJl" * 20  # about what the proof of an empty thinking block weighs


def read_conversation(path: Path) -> Conversation:
    """A recorded conversation with its pauses."""
    name = path.name.partition(".")[0]
    beside = path.parent / "requests.json"
    known = json.loads(beside.read_text()).get(name, {}) if beside.exists() else {}
    pauses = known.get("seconds_before_request") or []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return Conversation(name, steps_of([json.loads(line) for line in lines], pauses))


def steps_of(messages: list[Message], pauses: list[float | None]) -> list[Step]:
    steps: list[Step] = []
    said = ""
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = [agent.text_block(content)]
        if message["role"] == "assistant":
            pause = pauses[len(steps)] if len(steps) < len(pauses) else None
            if pause is None:
                pause = USUAL_PAUSE
            steps.append(Step(said, pause, reply_of(content, len(steps))))
            said = ""
            continue
        for result in content:
            if result["type"] == "tool_result":
                steps[-1].results.append((text_of(result), result.get("is_error", False)))
        texts = [block["text"] for block in content if block["type"] == "text"]
        said = "\n\n".join(text for text in texts if text.strip())
    for step in steps:  # that a command fails is no error: the agent says it by the exit status
        names = [call["name"] for call in step.calls]
        for index, name in enumerate(names[: len(step.results)]):
            text, is_error = step.results[index]
            step.results[index] = text, is_error and name != "bash"
    return [step for step in steps if step.reply]


def reply_of(content: list[Block], number: int) -> list[Block]:
    """A reply as a current model gives it: its thinking, of which only the proof comes, then what
    was recorded."""
    texts = [block for block in content if block["type"] == "text" and block["text"].strip()]
    calls = [fitting(block) for block in content if block["type"] == "tool_use"]
    for index, call in enumerate(calls):
        call["id"] = f"call_{number}_{index}"
    thought = {"type": "thinking", "thinking": "", "signature": f"{number:06}{SIGNATURE}"}
    return [thought, *texts, *calls] if texts or calls else []


def fitting(call: Block) -> Block:
    """The call as one of the agent's own tools would get it, its path inside the directory."""
    schema = SCHEMAS.get(call["name"])
    if schema and call["name"] != "compact":
        kinds = {name: KINDS[row["type"]] for name, row in schema["properties"].items()}
        given = call["input"].items()
        args = {name: value for name, value in given if isinstance(value, kinds.get(name, ()))}
        if "path" in args:
            args["path"] = os.path.normpath("/" + args["path"].lstrip("~")).lstrip("/")
        if args.keys() >= set(schema["required"]):
            return {"type": "tool_use", "name": call["name"], "input": args}
    whole = json.dumps({call["name"]: call["input"]}, ensure_ascii=False)
    return {"type": "tool_use", "name": "bash", "input": {"command": whole}}


def text_of(block: Block) -> str:
    content: Any = block.get("content", block.get("text", ""))
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)


# Made conversations have the sizes of recorded ones: a result has 85 tokens in the median and
# 12,600 in the 99th percentile, results are about 68 % of the context, 60 % of the readings are of
# a file that was read before.

MEDIAN = 85 * 3  # characters of a result
SPREAD = 2.15  # sigma of their log-normal distribution
LONGEST = 200_000
WORDS = (
    "value index parse error node path return state test buffer request open close line token "
    "write read merge cache limit offset handle result config"
).split()


class Maker:
    """A seeded source of conversations about a project whose files exist only in here."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.files: dict[str, str] = {}
        self.read: list[str] = []

    def text(self, size: float) -> str:
        """About `size` characters, in lines; no two lines are the same."""
        lines = []
        while size > 0:
            indent = " " * self.chance.choice((0, 4, 8))
            words = " ".join(self.chance.choices(WORDS, k=self.chance.randint(3, 12)))
            lines.append(f"{indent}{words} {self.chance.randrange(16**6):06x}")
            size -= len(lines[-1]) + 1
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
            usual = (4.4, 1.3) if typed else (1.8, 0.8)
            pauses.append(self.chance.lognormvariate(*usual))
            if answers and not typed:
                messages.append({"role": "assistant", "content": self.text(900)})
                messages.append({"role": "user", "content": self.text(150)})
            else:
                messages += self.work()
        return Conversation(name, steps_of(messages, pauses))

    def work(self) -> list[Message]:
        """One reply with one or several calls, and their results."""
        content: list[Block] = [agent.text_block(self.text(self.chance.expovariate(1 / 250)))]
        results = []
        for _ in range(self.chance.choices((1, 2, 4, 8), (80, 12, 6, 2))[0]):
            name, args, result = self.call()
            content.append({"type": "tool_use", "name": name, "input": args})
            results.append({"type": "tool_result", "content": result})
        return [{"role": "assistant", "content": content}, {"role": "user", "content": results}]

    def call(self) -> tuple[str, Block, str]:
        kinds = ("bash", "read", "edit", "write")
        kind = self.chance.choices(kinds, (52, 27, 18, 3))[0]
        if kind == "edit" and self.read:
            return self.edit(self.chance.choice(self.read[-6:]))
        if kind in ("bash", "edit"):
            return "bash", {"command": self.command()}, self.text(self.size(0.6))
        if kind == "read" and self.read and self.chance.random() < 0.6:
            path = self.chance.choice(self.read[-8:])
        else:
            path = self.new_file()
        self.read.append(path)
        if kind == "write":
            return "write_file", {"path": path, "content": self.files[path]}, "written"
        return "read_file", {"path": path}, self.files[path]

    def new_file(self) -> str:
        """A file begins with names that stand in no other."""
        name = f"{self.chance.choice(WORDS)}_{len(self.files)}"
        names = " ".join(f"{name}_{word}" for word in WORDS[:5])
        path = f"src/{name}.py"
        self.files[path] = names + "\n" + self.text(max(min(self.size(8.0), 60_000), 200))
        return path

    def command(self) -> str:
        """Some commands name what stands in a file that was read not long ago."""
        command = self.text(self.chance.expovariate(1 / 200))
        if self.read and self.chance.random() < 0.3:
            path = self.chance.choice(self.read[-12:])
            command += " " + " ".join(self.files[path].split()[:2])
        return command

    def edit(self, path: str) -> tuple[str, Block, str]:
        """Replace a few lines of a file that was read not long ago."""
        lines = self.files[path].split("\n")
        shown = self.files[path].count("\n", 0, 12_000)  # of a long file only the beginning is
        start = self.chance.randint(1, max(shown, 1))
        old = "\n".join(lines[start : start + 6])
        new = self.text(self.chance.expovariate(1 / 500))
        self.files[path] = self.files[path].replace(old, new, 1)
        return "edit_file", {"path": path, "old_text": old, "new_text": new}, "Edited."


def make_conversations(count: int) -> list[Conversation]:
    return [Maker(seed).conversation(f"made-{seed:02}") for seed in range(1, count + 1)]


# ================================ 2  The model that replays ================================
# It stands where the SDK's client would: the agent sends it requests and gets the recorded replies.
# For every tool stands one that gives the recorded result. The files of a conversation are on disk
# as far as it had shown or written them: so a memory that puts files back puts back these.

SUMMARY_TOKENS = 1_500
SUMMARY = "\n".join(
    f"- note {n}: what was done here and what it led to, in about as many words" for n in range(58)
)
NUMBER = re.compile(r"(?m)^ *(\d+)(?:→|\t|: ?|\| ?)")  # of a line, as some readers print it
REMINDER = re.compile(r"(?s)\s*<system-reminder>.*?</system-reminder>\s*")


class Event(dict[str, Any]):
    """A dict whose fields are attributes, and which can be turned into data, as the SDK's can."""

    def __getattr__(self, name: str) -> Any:
        value = self.get(name)
        return Event(value) if isinstance(value, dict) else value

    def to_dict(self, **options: Any) -> Block:
        return dict(self)


class Stream:
    """One reply as events: each block comes in one piece."""

    def __init__(self, content: list[Block], usage: dict[str, int]) -> None:
        blocks = [Event(block) for block in content]
        calls = any(block["type"] == "tool_use" for block in content)
        stop = "tool_use" if calls else "end_turn"
        self.current_message_snapshot = Event(content=blocks, stop_reason=stop, usage=usage)

    def __iter__(self) -> Iterator[Event]:
        for index, block in enumerate(self.current_message_snapshot["content"]):
            yield Event(type="content_block_start", index=index, content_block=block)
        yield Event(type="message_stop")


class Player:
    """The client of an agent: plays the step that is set; each request is entered in the ledger."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger
        self.messages = self  # `client.messages.stream`
        self.step = Step()
        self.left: list[tuple[str, bool]] = []  # results of the step's calls, still to come
        self.summary = SUMMARY

    def stream(self, **params: Any) -> nullcontext[Stream]:
        is_summary = SUMMARY_MARK in text_of(params["messages"][-1]["content"][-1])
        usage: dict[str, int] = {}
        if self.ledger:
            usage = self.ledger.enter(params, None if is_summary else self.step)
        if is_summary:
            return nullcontext(Stream([agent.text_block(self.summary)], usage))
        self.left = list(self.step.results)
        return nullcontext(Stream(self.step.reply, usage))


def replayed(tool: agent.Tool) -> agent.Tool:
    """The tool with the recorded result of the call whose turn it is."""

    @wraps(tool.function)
    def function(a: agent.Agent, **args: Any) -> Any:
        text, is_error = a.model.client.left.pop(0)
        if is_error:
            raise ValueError(text)
        if not tool.is_file_tool:
            return text
        old = known_content(a, args["path"])
        new = content_after(args, text, old).encode("utf-8", "replace")
        file = a.workspace.root / args["path"]
        change = agent.Change(file, args["path"], old or None, new, text, a.workspace.root)
        if tool.changes:
            return change
        with suppress(OSError, ValueError):
            a.workspace.apply(change)
        return text

    return replace(tool, function=function)


def known_content(a: agent.Agent, path: str) -> bytes:
    file = a.workspace.root / path
    return file.read_bytes() if file.is_file() else b""


def content_after(args: Block, shown: str, before: bytes) -> str:
    """What is known of a file after a call, from what was known before it."""
    old = before.decode()
    if "content" in args:
        return str(args["content"])
    if "old_text" in args:
        if args["old_text"] and args["old_text"] in old:
            return old.replace(
                args["old_text"], args["new_text"], -1 if "replace_all" in args else 1
            )
        return f"{old}\n{args['new_text']}"  # the place was never shown
    number = NUMBER.match(shown)
    first = int(number[1]) if number else args.get("offset", 1)
    part = NUMBER.sub("", REMINDER.sub("", shown))
    if part in old:
        return old
    return part if first <= 1 and "limit" not in args else f"{old}\n{part}"


@contextmanager
def scripted_agent(player: Player, **settings: Any) -> Iterator[agent.Agent]:
    """The real agent in an empty directory, with the player as its model and for its tools."""
    agent.WAITS = (0, 0, 0)  # a fault of the replay shows at once
    real = dict(agent.TOOLS)
    agent.TOOLS.update({n: replayed(tool) for n, tool in real.items() if n != "compact"})
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = new_agent(folder, max_turns=1, **settings)
            made.model.name = "scripted"
            made.model.client = player
            yield made
    finally:
        agent.TOOLS.update(real)


def new_agent(folder: str, **settings: Any) -> agent.Agent:
    made = agent.Settings(api_key="none", **settings)
    return agent.Agent(made, folder, allow=lambda call: agent.Verdict(True))


def play(a: agent.Agent, step: Step) -> None:
    """One turn of the agent's loop, which then says that it stops after the one that is allowed.

    The pause before it passes first: a summary that it causes finds the cache as cold as it is.
    """
    player = a.model.client
    player.step = step
    if player.ledger:
        player.ledger.clock += step.pause
    a.model.last_reply -= step.pause
    a.last_result = ()  # a recorded model may repeat itself
    if step.said:
        a.log({"closed": "done"})
        a.begin(step.said, "")
    try:
        a.work()
    except agent.Stopped as stop:
        if "AGENT_MAX_TURNS" not in str(stop):
            raise


# ================================ 3  The price of a request ================================
# In tokens at the price of one uncached token of input. An entry of the cache is made at each
# breakpoint of a request: at its end, and where a block asks for one. An entry is looked for at
# most 20 blocks back from a breakpoint, and lost five minutes after its last use.

READ, WRITE, OUTPUT = 0.1, 1.25, 5.0
LOOK_BACK = 20  # blocks
LIFETIME = 300  # seconds
NEVER = 10**9
SUMMARY_SECONDS = 20  # what writing one takes
CALL_TOKENS = 60  # of a call that reads a text again
LOOK_UP_TOKENS = 300  # of what a search for a name returns
LARGEST_READING = 24_000 // 3  # tokens of a file that is read again; more does not come at once
TOKENS_PER_BYTE = 0.35  # mixed tool output has 2.85 characters a token
MARK = re.compile(r"(?m)^\| ")  # of a quoted line in a memory
WORD = re.compile(r"[\w./-]+")

Key = tuple[str, str, str]  # kind, id, text: what tells a block from another one


@lru_cache(10_000)
def names_in(text: str) -> frozenset[str]:
    """The paths and identifiers of a text; plain words are none."""
    found = set()
    for word in set(WORD.findall(text)):
        word = word.strip("./-")
        if "/" in word:
            found.add(word)
            continue
        for part in re.split("[.-]", word):
            inner = part.strip("_")[1:]
            if 6 <= len(part) <= 80 and ("_" in inner or has_hump(inner)):
                found.add(part)
    return frozenset(found)


def has_hump(word: str) -> bool:
    return word.isalnum() and word != word.lower() and word != word.upper()


def size_in_tokens(text: str) -> int:
    return int((len(text.encode("utf-8", "replace")) + 40) * TOKENS_PER_BYTE)


@cache
def fixed_text() -> str:
    """About what the system prompt and the tools weigh, the same for every policy."""
    return agent.SYSTEM + json.dumps(SCHEMAS)


class Ledger:
    """What the requests of one conversation cost, and what was missing in them."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.entries: dict[int, float] = {}  # prefix -> when it was last used
        self.inputs: dict[str, str] = {}  # of a call, as text
        self.sizes: dict[Key, int] = {}
        self.readable: dict[Key, str] = {}
        self.past: list[str] = []  # what the conversation has shown or written so far
        self.past_names: set[str] = set()
        self.readings: dict[str, int] = {}  # path -> tokens of its last reading
        self.cost = 0.0
        self.forced = 0.0  # of that, for texts that were gone
        self.count: Counter[str] = Counter()
        self.contexts: list[int] = []  # tokens of each request
        self.end = 0  # the prefix that the last request was

    def enter(self, params: Block, step: Step | None) -> dict[str, int]:
        """Enter a request; without a step it is one for a summary. Returns its usage."""
        blocks = [block for message in params["messages"] for block in message["content"]]
        keys: list[Key] = [("system", "", fixed_text()), *map(self.key, blocks)]
        places = [n for n, block in enumerate(blocks, 2) if "cache_control" in block]
        if "cache_control" in params:
            places.append(len(keys))
        read, written = self.charge(keys, sorted(set(places)), is_summary=step is None)
        if step:
            self.contexts.append(read + written)
            self.inspect(keys, step)
        else:
            self.clock += SUMMARY_SECONDS
        return {
            "input_tokens": 0,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": written,
        }

    def key(self, block: Block) -> Key:
        kind = block["type"]
        if kind == "tool_use":
            name = block["id"]
            if name not in self.inputs:
                self.inputs[name] = json.dumps(block["input"], ensure_ascii=False)
            return kind, name, self.inputs[name]
        return kind, str(block.get("tool_use_id", block.get("signature", ""))), text_of(block)

    def size(self, key: Key) -> int:
        if key not in self.sizes:
            self.sizes[key] = size_in_tokens("".join(key))
        return self.sizes[key]

    def charge(self, keys: list[Key], places: list[int], is_summary: bool) -> tuple[int, int]:
        """Enter what is read from the cache, up to its longest entry, and what is written."""
        prefixes = [0]
        for key in keys:
            prefixes.append(hash((prefixes[-1], key)))
        near = {n for place in places for n in range(max(place - LOOK_BACK, 1), place + 1)}
        warm = max((n for n in near if self.is_warm(prefixes[n])), default=0)
        for n in {warm, *places} - {0}:
            self.entries[prefixes[n]] = self.clock

        if is_summary:
            self.count["summaries"] += 1
            self.cost += OUTPUT * SUMMARY_TOKENS
        else:
            self.count["requests"] += 1
            self.count["rewritten"] += bool(self.end and self.end not in prefixes)
            self.end = prefixes[-1]
        sizes = [self.size(key) for key in keys]
        read, written = sum(sizes[:warm]), sum(sizes[warm:])
        self.cost += READ * read + WRITE * written
        return read, written

    def is_warm(self, prefix: int) -> bool:
        return self.clock - self.entries.get(prefix, -NEVER) <= LIFETIME

    def inspect(self, keys: list[Key], step: Step) -> None:
        """Could the reply that was recorded have been given to this request?"""
        self.remember(step.said)
        paid = set()  # names that come with a text that is read again
        for call in step.calls:
            old = str(call["input"].get("old_text", "")).strip()
            if call["name"] == "edit_file" and old:
                self.count["edits"] += 1
                if not stands(old, map(self.plain, keys)) and stands(old, self.past):
                    self.count["blind"] += 1
                    self.look_up(self.readings.get(call["input"]["path"], size_in_tokens(old)))
                    paid |= names_in(self.key(call)[2])
        used = names_in("\n".join(self.key(block)[2] for block in step.reply))
        if len(self.missing(used & self.past_names - paid, keys)) >= 2:
            self.count["look-ups"] += 1
            self.look_up(LOOK_UP_TOKENS)
        self.learn(step)

    def look_up(self, tokens: int) -> None:
        """One more request, which reads a text that was gone."""
        price = READ * self.contexts[-1] + OUTPUT * CALL_TOKENS + WRITE * tokens
        self.cost += price
        self.forced += price

    def missing(self, names: set[str], keys: list[Key]) -> set[str]:
        """Those of the names that stand nowhere in a request."""
        for key in reversed(keys):
            if not names:
                break
            names = names - names_in(self.plain(key))
        return {name for name in names if not stands(name, map(self.plain, keys))}

    def learn(self, step: Step) -> None:
        """Remember what a reply and its results have shown."""
        for block in step.reply:
            self.remember(self.plain(self.key(block)))
        for call, (text, is_error) in zip(step.calls, step.results, strict=True):
            self.remember(NUMBER.sub("", text))
            if call["name"] == "read_file" and not is_error:
                tokens = min(size_in_tokens(text), LARGEST_READING)
                self.readings[call["input"]["path"]] = tokens

    def remember(self, text: str) -> None:
        if text:
            self.past.append(text)
            self.past_names |= names_in(text)

    def plain(self, key: Key) -> str:
        """The text of a block without marks and numbers of its lines; of a call its arguments."""
        if key not in self.readable:
            text = key[2]
            if key[0] == "tool_use":
                text = "\n".join(map(str, json.loads(text).values()))
            elif text.startswith(agent.COMPRESSED):
                text = MARK.sub("", text)
            elif key[0] in ("tool_result", "text"):
                text = NUMBER.sub("", text)
            self.readable[key] = text
        return self.readable[key]


def stands(text: str, texts: Iterable[str]) -> bool:
    return any(text in other for other in texts)
