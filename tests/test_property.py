"""Random conversations against the strict stand-in: whatever happens, every request is valid and nothing is lost.

Scripts of replies, faults, Ctrl-C, compaction and resume are drawn at random, and all the rules of `Conversation.check`
are looked at after every prompt. The normal run plays a few conversations; the bench setting plays many:

    AGENT_EXAMPLES=2000 python -m pytest -n 2 tests/test_property.py tests/test_property_processes.py
"""

import copy
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from harness import agent, processes, session
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from messages_api import Fault, MessagesAPI, Reply, call, is_summary, redacted, text, thinking

EXAMPLES = int(os.environ.get("AGENT_EXAMPLES", "200"))
MAX_TURNS, MAX_TRIES = 12, 1 + len(agent.WAITS) + 1  # one more without cache_control or thinking
THRESHOLDS = (0, 2_000, 4_000, 100_000)
MARK = f"75{os.getpid()}.{time.time_ns() % 10**9}"  # seconds: a sleep of this length is of this run

WORDS = st.sampled_from(["", "  \n", "hello", "naïve 你好 😀", "\ud800 alone", "long " * 900, "[Previous: used bash"])
OUTPUTS = {"seq 1 2000": "".join(f"{i}\n" for i in range(1, 2001)).encode(), "yes | head -c 300000": b"y\n" * 150_000,
           "printf 'A\\377\\0B%03000d' 7": b"A\xff\0B" + b"0" * 2999 + b"7"}
COMMANDS = st.sampled_from([
    *OUTPUTS, "true", "false", "echo hi", "head -c 50000 /dev/zero", "kill -9 $$", "sleep 0.15",
    f"echo half; kill -INT $PPID; sleep {MARK}", f"sleep {MARK} & echo half; sleep 0.01; kill -INT $PPID; sleep {MARK}"])
CALLS = st.one_of(
    COMMANDS.map(lambda command: call("bash", {"command": command})),
    st.sampled_from(["f", "g/h", "../out", "", "."]).map(lambda path: call("read_file", {"path": path})),
    st.tuples(st.sampled_from(["f", "g/h", "../out"]), WORDS).map(
        lambda args: call("write_file", {"path": args[0], "content": args[1]})),
    st.just(call("edit_file", {"path": "f", "old_text": "hello", "new_text": "goodbye"})),
    st.sampled_from([{}, {"focus": "f"}, {"focus": 7}]).map(lambda args: call("compact", args)),
    st.sampled_from(["Bash", "", "a b"]).map(lambda name: call(name, {"x": 1})),
    st.sampled_from(['{"command": "tr', "[1]", "null", '"text"', '{"command": NaN}']).map(lambda raw: call("bash", raw=raw)),
    st.sampled_from(["same", "odd id!", "", "x" * 80]).map(lambda name: call("bash", {"command": "echo 1"}, id=name)),
    st.just(call("bash", {"command": f"sleep {MARK} & echo late; timeout 999 sleep {MARK}; true", "timeout": 0.1})),
)
BLOCKS = st.one_of(WORDS.map(text), CALLS, st.just({"type": "brand_new", "x": 1}), st.builds(thinking), st.builds(redacted))
REPLIES = st.builds(
    lambda blocks, stop, end, pace: Reply(blocks, stop_reason=stop, end=end, pace=pace),
    st.lists(BLOCKS, max_size=4),
    st.sampled_from(["auto"] * 12 + ["end_turn", "tool_use", "max_tokens", "pause_turn", "refusal", "stop_sequence", None,
                                     agent.WINDOW]),
    st.sampled_from(["stop"] * 12 + ["no_stop", "no_reason", "reset", "error", "llama", "garbage", "stall"]),
    st.sampled_from([0] * 9 + [0.002]),
)
FAULTS = st.sampled_from([
    Fault(429, headers={"retry-after": "0.05"}), Fault(429, headers={"retry-after": "86400"}), Fault(500), Fault(529), Fault(0),
    Fault(400, "prompt is too long: 9 tokens > 8 maximum"), Fault(400, "no"), Fault(401), Fault(502, body="<html>x</html>"),
    Fault(200, body="<html>", content_type="text/html"), Fault(400, "messages.1: Invalid `signature` in `thinking` block"),
])
OWN = (agent.GO_ON, "[Lost.]", agent.LOST["content"])  # what the wire puts where something is missing
# A Ctrl-C, if there is one: so many seconds after the request came in, so in any part of what follows.
PRESSES = st.sampled_from([None] * 12 + [0, 0.001, 0.003, 0.006, 0.01, 0.03])
ANSWERS = st.one_of(*[st.tuples(REPLIES, PRESSES)] * 6, *[st.tuples(FAULTS, PRESSES)] * 2,
                    st.tuples(WORDS.map(lambda words: Reply(words, end="stall")), st.sampled_from([0.02, 0.04])))
SUMMARIES = st.tuples(st.one_of(st.sampled_from(["A summary.", "", "x" * 60_000]).map(Reply), REPLIES, FAULTS), PRESSES)
PERMISSIONS = st.sampled_from(["yes"] * 5 + ["no", "interrupt"])
AFTERWARDS = st.sampled_from(["nothing"] * 4 + ["compact", "resume"])
PROMPTS = st.tuples(WORDS.filter(str.strip), st.lists(ANSWERS, min_size=1, max_size=10), st.sampled_from([False] * 4 + [True]),
                    st.lists(SUMMARIES, max_size=2), PERMISSIONS, AFTERWARDS)


def ctrl_c(number, frame):
    """Python's own handler, but only while a conversation is in the agent: a late press is not to end the test."""
    codes = set()
    while frame:
        codes.add(frame.f_code)
        frame = frame.f_back
    if Conversation.play.__code__ in codes and Conversation.check.__code__ not in codes:
        if any(code.co_filename == agent.__file__ for code in codes):
            raise KeyboardInterrupt


def as_logged(words):
    """A text as it stands in a line of a transcript."""
    return json.dumps(agent.plain(words), ensure_ascii=False)[1:-1]


def logged(request):
    """The blocks of a request, with their texts, that must be on disk: what was said, called or returned, as it was sent.
    Not what the program says in its place, and no order to write a summary."""
    for message in request.messages[: -1 if is_summary(request) else None]:
        for block in agent.blocks(message):
            said = agent.block_text(block)
            placeholder = block["type"] == "tool_result" and said.startswith("[Previous: used")
            if block["type"] in ("text", "tool_use", "tool_result") and not placeholder and said not in OWN:
                yield block, said


def taken(item, ends):
    """Is this a reply that goes into the conversation?"""
    if isinstance(item, Fault) or item.end not in ends or item.stop_reason in ("refusal", agent.WINDOW):
        return False
    raws = [block.raw for block in item.blocks if block["type"] == "tool_use"]
    return item.stop_reason == "max_tokens" or not any("NaN" in raw or raw.endswith("tr") for raw in raws)


def refused(served):
    """Was the prompt refused, so that Ctrl-C may have come after it was taken out of the conversation?"""
    return bool(served) and (isinstance(served[-1], Fault) or served[-1].stop_reason == "refusal")


def resources():
    """How many sockets this process has open (the SDK's and the stand-in's), how many other files, how many threads."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(entry).startswith("socket:"))
    return sum(found), len(found) - sum(found), threading.active_count()


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return done


class Conversation:
    """One conversation with the stand-in, and what must be true of it."""

    def __init__(self, api, client, cwd, threshold, used):
        self.api, self.client, self.cwd, self.threshold = api, client, cwd, threshold
        self.used = used  # resources after each prompt, of all conversations with this stand-in
        self.timers = []
        self.words = []  # what the user typed and the server did not refuse
        self.seen = set()  # texts of requests that were found on disk already
        self.lost = set()  # ids of calls that need no answer
        self.outputs = {}  # id of a call of bash that has ended -> what it wrote, if that was long
        self.session = self.new_session()

    def new_session(self):
        return session(self.api, self.cwd, client=self.client, threshold=self.threshold, clear_at_least=0, bash_timeout=20,
                       max_turns=MAX_TURNS)

    # ---- what the stand-in and the user do ----

    def answer(self, request):
        """The script: the next answer, its texts numbered, and the Ctrl-C that goes with it."""
        if len(self.api.requests) - self.before > 3 * MAX_TURNS * MAX_TRIES:
            return Fault(401)  # too many: the check will say so
        if is_summary(request):
            item, press = self.summaries.pop(0) if self.summaries else (Reply("A summary."), None)
        else:
            item, press = self.answers.pop(0) if self.answers else (self.last, None)
            if isinstance(item, Reply):
                item = copy.copy(item)
                item.blocks = [text(f"Text {len(self.api.requests)}.{i}: {block['text']}") if block.get("text", "").strip() else block
                               for i, block in enumerate(item.blocks)]
            self.served.append(item)
        if press is not None and not self.timers:  # once a prompt: the first one ends it
            self.timers.append(threading.Timer(press, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)))
            self.timers[0].start()
        return item

    def press_no_more(self):
        for timer in self.timers:
            timer.cancel()
            timer.join()

    def play(self, prompt, answers, for_ever, summaries, permission, afterwards):
        """One prompt, whatever happens to it, and then perhaps a compaction or a new start."""
        for_ever = for_ever and getattr(answers[0][0], "end", "") != "stall"
        self.last = answers[0][0] if for_ever else Reply("The end.")
        self.answers, self.summaries, self.served, self.timers = [] if for_ever else list(answers), list(summaries), [], []
        withdrawn = self.interrupted = False
        self.before, self.shown = len(self.api.requests), len(self.session.screen.out.getvalue())

        def allow(name, args):
            if permission == "interrupt":
                signal.raise_signal(signal.SIGINT)
            return "no" if permission == "no" else ""

        self.session.allow = allow
        self.session.add("user", prompt)
        try:
            agent.agent_loop(self.session)
        except (agent.Stopped, KeyboardInterrupt) as end:
            self.interrupted = isinstance(end, KeyboardInterrupt)
            withdrawn = bool(re.search(r"^4(?!08|09|29)|no Messages API|declined", str(end)))
            withdrawn = withdrawn or self.interrupted and refused(self.served)
        self.words += [] if withdrawn and len(self.session.words) == len(self.words) else [agent.plain(prompt)]
        self.check()
        if afterwards == "compact":  # as the terminal does it
            with suppress(KeyboardInterrupt):
                agent.run_compact(self.session)
                if self.session.focus is not None:
                    agent.auto_compact(self.session)
        self.press_no_more()
        if afterwards == "resume":
            self.session = self.new_session()
            try:
                agent.resume(self.session)
            except agent.Stopped:  # nothing to go on with: the only prompt there was has been refused
                assert not self.words
        if afterwards != "nothing":
            self.check()

    # ---- what must be true after it ----

    def check(self):
        asked = self.api.requests[self.before :]
        self.disk = "".join(path.read_text() for path in self.cwd.glob(".transcripts/*.jsonl"))
        assert self.api.refused == []
        self.requests_are_few(asked)
        self.words_are_kept()
        self.calls_are_answered()
        self.requests_are_on_disk(asked)
        self.replies_are_on_disk()
        self.outputs_are_on_disk()
        assert until(lambda: not processes(MARK)), "a process of a stopped call is left"
        assert until(self.little_is_open), (self.used[0], self.used[-1])

    def little_is_open(self):
        """As much as after the very first prompt. A connection has two sockets and a thread; a Ctrl-C closes it."""
        self.used.append(resources())
        return all(now <= first + 3 for first, now in zip(self.used[0], self.used[-1]))

    def requests_are_few(self, asked):
        """Also of an answer that comes for ever: so many turns, each with so many tries, and as many for summaries."""
        summaries = sum(map(is_summary, asked))
        assert len(asked) - summaries <= MAX_TURNS * MAX_TRIES
        assert summaries <= 2 * MAX_TURNS * MAX_TRIES

    def words_are_kept(self):
        """All that was typed is known, and in what would be sent now: whole, or cut with the address of the rest."""
        assert self.session.words == self.words
        view = "\n".join(agent.block_text(block) for message in agent.valid(self.session.messages)
                         for block in agent.blocks(message) if message["role"] == "user" and block["type"] == "text")
        lines = view.replace("\n| ", "\n")
        named = {name: (self.cwd / name).read_text() for name in re.findall(r"the whole is in (\S+?\.jsonl) \.\.\.\]", view)}
        for words in self.words:
            assert as_logged(words) in self.disk
            assert "\n".join(words.splitlines()) in lines or any(as_logged(words) in whole for whole in named.values())

    def calls_are_answered(self):
        """Once each. (A press between a reply and its first call leaves them open: the wire says that they are lost.)"""
        messages = self.session.messages
        calls = {block["id"] for block in agent.all_blocks(messages, "tool_use")}
        answers = Counter(block["tool_use_id"] for block in agent.all_blocks(messages, "tool_result"))
        last = [message for message in messages if message["role"] == "assistant"][-1:]
        if self.interrupted and self.timers:
            self.lost |= {block["id"] for block in agent.all_blocks(last, "tool_use")} - answers.keys()
        assert calls - self.lost <= answers.keys() <= calls
        assert set(answers.values()) <= {1}

    def requests_are_on_disk(self, asked):
        commands = {}
        for request in asked:
            for block, said in logged(request):
                if block["type"] == "tool_use":
                    commands[block["id"]] = block["input"].get("command")
                elif said not in self.seen:
                    assert as_logged(said) in self.disk
                    self.seen.add(said)
                command = commands.get(block.get("tool_use_id"))
                if command in OUTPUTS and said.endswith("[exit status 0]"):
                    self.outputs[block["tool_use_id"]] = OUTPUTS[command]

    def replies_are_on_disk(self):
        """The text of each whole reply, and of one in which Ctrl-C came, what was on the screen of it."""
        screen = self.session.screen.out.getvalue()[self.shown :]
        for reply in self.served:
            stopped = self.interrupted and reply is self.served[-1]
            if taken(reply, ("stop", "llama", "stall") if stopped else ("stop", "llama")):
                for said in (block["text"] for block in reply.blocks if block.get("type") == "text"):
                    if stopped:
                        said = said[: max((n for n in range(9, len(said) + 1) if said[:n] in screen), default=0)]
                    assert not said.strip() or as_logged(said) in self.disk

    def outputs_are_on_disk(self):
        """A long output is whole in a file, byte by byte. (After a resume there is also what the model saw of it.)"""
        for name, output in self.outputs.items():
            assert output in [path.read_bytes() for path in self.cwd.glob(f".transcripts/*/{name}.txt")]


@pytest.fixture
def stage():
    """A stand-in whose script can be changed, and a client that waits a second for it, not ten minutes."""
    before = signal.signal(signal.SIGINT, ctrl_c)
    with MessagesAPI(lambda request: api.script(request)) as api:
        client = agent.get_client(session(api, Path.cwd())).with_options(timeout=1)
        yield api, client
        client.close()
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a Ctrl-C in the garbage collector
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_any_conversation_is_valid_and_complete(stage, threshold):
    api, client = stage
    used = []

    @settings(max_examples=max(EXAMPLES // len(THRESHOLDS), 1), deadline=None, report_multiple_bugs=False,
              phases=set(Phase) - {Phase.explain}, suppress_health_check=list(HealthCheck))
    @given(prompts=st.lists(PROMPTS, min_size=1, max_size=4))
    def converse(prompts):
        cwd = Path(tempfile.mkdtemp())
        conversation = Conversation(api, client, cwd, threshold, used)
        api.script = conversation.answer
        try:
            for number, (words, *rest) in enumerate(prompts):
                conversation.play(f"{words} #{number}", *rest)
        except BaseException:
            used.clear()  # hypothesis keeps the traceback, and with it what was open
            raise
        finally:
            conversation.press_no_more()
            for process in processes(MARK):  # the next example is not to find it, too
                os.kill(process, signal.SIGKILL)
            shutil.rmtree(cwd)
            api.requests.clear()
            api.refused.clear()

    converse()
