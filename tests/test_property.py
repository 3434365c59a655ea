"""Random conversations: whatever happens, every request is valid and nothing is lost or stuck.

Replies, faults, refusals, overflows, losses of the record, Ctrl-C, compaction and a new start are
drawn at random; after every prompt all that `Conversation.check` names must hold. The normal run
plays a few conversations. This plays many:

    AGENT_EXAMPLES=2000 python -m pytest -n 2 tests/test_property*.py
"""

import copy
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness import agent, make_agent, processes, said
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from messages_api import Fault, MessagesAPI, Reply, call, is_summary, redacted, text, thinking

EXAMPLES = int(os.environ.get("AGENT_EXAMPLES", "40"))
MAX_TURNS = 12
MAX_REQUESTS = 600  # for one prompt; more would be endless
THRESHOLDS = (0, 2_000, 4_000, 100_000)
MARK = f"75{os.getpid()}.{time.time_ns() % 10**9}"  # seconds: a sleep of this length is of this run
BAD = "unspeakable"  # a word that some servers refuse
WINDOW = agent.WINDOW_EXCEEDED

# ================================ what may happen ================================

WORDS = st.sampled_from(
    ["", "  \n", "hello", "naïve 你好 😀", "\ud800 alone", "long " * 900, "[Previous: used bash"]
)
PROMPT_WORDS = st.one_of(*[WORDS.filter(str.strip)] * 6, st.just(f"say {BAD}"))
OUTPUTS = {
    "seq 1 2000": "".join(f"{i}\n" for i in range(1, 2001)).encode(),
    "yes | head -c 300000": b"y\n" * 150_000,
    "printf 'A\\377\\0B%03000d' 7": b"A\xff\0B" + b"0" * 2999 + b"7",
}
LOSSES = ["rm -rf .transcripts", "rm -f .transcripts/*.jsonl .transcripts/marker"]
COMMANDS = st.sampled_from(
    [
        *OUTPUTS,
        *LOSSES,
        "true",
        "false",
        "echo hi",
        f"printf {BAD[:4]}; echo {BAD[4:]}",
        f"printf {BAD[:4]} >> f; echo {BAD[4:]} >> f",
        "head -c 50000 /dev/zero",
        "kill -9 $$",
        "sleep 0.15",
        "sleep 0.05 & echo started",
        f"echo half; kill -INT $PPID; sleep {MARK}",
        f"sleep {MARK} & echo half; sleep 0.01; kill -INT $PPID; sleep {MARK}",
    ]
)
ODD_CALLS = [
    *[call(name, {"x": 1}) for name in ("Bash", "", "a b")],
    *[call("compact", args) for args in ({}, {"focus": "f"}, {"focus": 7})],
    *[call("bash", {"command": "echo 1"}, id=name) for name in ("same", "odd id!", "", "x" * 80)],
    *[call("read_file", {"path": path}) for path in ("f", "g/h", "../out", "", ".")],
    call("edit_file", {"path": "f", "old_text": "hello", "new_text": "goodbye"}),
    call("bash", {"command": f"sleep {MARK} & timeout 99 sleep {MARK}", "timeout": 0.1}),
]
RAW = ['{"command": "tr', "[1]", "null", '"text"', '{"command": NaN}']
CALLS = st.one_of(
    *[COMMANDS.map(lambda command: call("bash", {"command": command}))] * 2,
    st.tuples(st.sampled_from(["f", "g/h", "../out"]), WORDS).map(
        lambda args: call("write_file", {"path": args[0], "content": args[1]})
    ),
    st.sampled_from(ODD_CALLS),
    st.sampled_from(RAW).map(lambda raw: call("bash", raw=raw)),
)
BLOCKS = st.one_of(
    WORDS.map(text),
    CALLS,
    CALLS,
    st.just({"type": "brand_new", "x": 1}),
    st.builds(thinking),
    st.builds(redacted),
)
REASONS = ["end_turn", "tool_use", "max_tokens", "pause_turn", "refusal", "stop_sequence", None]
REPLIES = st.builds(
    lambda blocks, stop, end, pace: Reply(blocks, stop_reason=stop, end=end, pace=pace),
    st.lists(BLOCKS, max_size=4),
    st.sampled_from(["auto"] * 12 + [*REASONS, WINDOW]),
    st.sampled_from(["stop"] * 12 + ["no_stop", "no_reason", "reset", "error", "llama", "garbage"]),
    st.sampled_from([0] * 9 + [0.002]),
)


def error_event(message):
    """A 200 stream that holds nothing but an error."""
    error = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    body = f"event: error\ndata: {json.dumps(error)}\n\n"
    return Fault(200, body=body, content_type="text/event-stream")


OVERFLOWS = [
    Fault(400, "prompt is too long: 9000 tokens > 8000 maximum"),
    Fault(400, "Your request exceeded model token limit: 8000"),
    Fault(413, "request too large"),
    Fault(422, "please reduce the length of the messages"),
    Fault(500, "the request exceeds the available context size"),
    error_event("input token count exceeds the maximum number of tokens"),
    Reply("It is", stop_reason=WINDOW),
    Reply(thinks=False),
]
FAULTS = st.sampled_from(
    [
        *OVERFLOWS[:-1],
        Fault(429, headers={"retry-after": "0.05"}),
        Fault(429, headers={"retry-after": "86400"}),
        Fault(500),
        Fault(529),
        Fault(0),
        Fault(400, "no"),
        Fault(400, "max_tokens: 16000 exceeds the limit of 8192 for this model"),
        Fault(400, "input length and `max_tokens` exceed context limit: 9 + 16000 > 16008"),
        Fault(400, "messages.1: Invalid `signature` in `thinking` block"),
        Fault(400, "cache_control: Extra inputs are not permitted"),
        Fault(401),
        Fault(502, body="<html>x</html>"),
        Fault(200, body="<html>", content_type="text/html"),
    ]
)
# A Ctrl-C, if there is one: so many seconds after the request came in, so in any part of what
# follows. Or at the n-th line of agent.py that the prompt runs.
PRESSES = st.sampled_from([None] * 12 + [0, 0.001, 0.003, 0.006, 0.01, 0.03])
LINES = st.one_of(*[st.just(0)] * 4, st.integers(1, 300), st.integers(1, 5_000))
STALLS = WORDS.map(lambda words: Reply(words, end="stall"))
ANSWERS = st.one_of(
    *[st.tuples(REPLIES, PRESSES)] * 6,
    *[st.tuples(FAULTS, PRESSES)] * 2,
    st.tuples(STALLS, st.sampled_from([0.02, 0.04])),
)
GOOD_SUMMARIES = st.sampled_from(["A summary.", "", "x" * 60_000]).map(Reply)
SUMMARIES = st.tuples(st.one_of(GOOD_SUMMARIES, REPLIES, FAULTS), PRESSES)
PERMISSIONS = st.sampled_from(["yes"] * 5 + ["no", "interrupt"])
AFTERWARDS = st.sampled_from(["nothing"] * 4 + ["compact", "resume", "lose", "lose and compact"])
PROMPTS = st.tuples(
    PROMPT_WORDS,
    st.lists(ANSWERS, min_size=1, max_size=10),
    st.sampled_from([False] * 4 + [True]),
    st.lists(SUMMARIES, max_size=2),
    PERMISSIONS,
    LINES,
    AFTERWARDS,
)
# What the server is like: how many tokens it takes, how it says so, whether it refuses a word.
SERVERS = st.tuples(
    st.sampled_from([0, 0, 0, 4_000, 10_000]),
    st.sampled_from(OVERFLOWS),
    st.booleans(),
)


# ================================ how it is looked at ================================


def as_logged(words):
    """A text as it stands in a line of a transcript."""
    return json.dumps(agent.plain(words), ensure_ascii=False)[1:-1]


# What the program puts into a request where something is missing.
OWN = (agent.CUT_OFF.message, agent.BEGINNING_LOST, agent.LOST)


def logged(request):
    """The blocks of a request, with their texts, that must be on disk as they were sent.

    Not what the program says in their place, and no order to write a summary.
    """
    for message in request.messages[: -1 if is_summary(request) else None]:
        for block in message["content"]:
            words = agent.block_text(block)
            is_result = block["type"] == "tool_result"
            if is_result and words.startswith("[Previous: used") or words in OWN:
                continue
            if block["type"] in ("text", "tool_use", "tool_result"):
                yield block, words


def transcripts_of(cwd):
    """All records of a directory as one text."""
    paths = cwd.glob(".transcripts/*.jsonl")
    return "".join(path.read_text("utf-8", "replace") for path in paths)


def resources():
    """How many sockets this process has open, how many other files, how many threads."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(entry).startswith("socket:"))
    return sum(found), len(found) - sum(found), threading.active_count()


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return done


def shown_part(words, screen):
    """The longest beginning of a text that is on the screen."""
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if words[:middle] in screen:
            low = middle
        else:
            high = middle - 1
    return words[:low]


def states_of(made):
    """What was typed in a conversation, and what became of it."""
    return [(agent.plain(p.text), p.state) for p in made.prompts]


@contextmanager
def ctrl_c_at_line(number):
    """Ctrl-C at the n-th line of agent.py that runs in this thread; 0: never."""
    left = number

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != agent.__file__:
            return None
        if isinstance(frame.f_locals.get("self"), agent.Interrupts):
            return None  # between two of its lines no signal can come
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    if number:
        sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Conversation:
    """One conversation with the stand-in, and what must be true of it."""

    def __init__(self, api, client, threshold, server, used):
        self.api = api
        self.client = client
        self.threshold = threshold
        self.window, self.overflow, self.is_strict = server
        self.used = used  # resources after each prompt, of all conversations with this stand-in
        self.cwd = Path(tempfile.mkdtemp())
        self.timers = []
        self.looking = 0  # requests that are looked at
        self.faults = []  # what was wrong with a request when it came in
        self.words = []  # what the user typed
        self.gone = set()  # prompts that the server has refused
        self.seen = set()  # texts of requests that were found on disk already
        self.lost = set()  # ids of calls that need no answer, and of results that need no call
        self.ended = set()  # ids of calls that have ended
        self.outputs = {}  # id of a call of bash that has ended -> what it wrote, if that was long
        self.agent = self.new_agent()
        self.served = []

    def new_agent(self):
        numbers = {"threshold": self.threshold, "bash_timeout": 20, "max_turns": MAX_TURNS}
        made = make_agent(self.api, self.cwd, clear_at_least=0, **numbers)
        signal.signal(signal.SIGINT, self.ctrl_c)
        made.model.client = self.client
        made.meet_server()
        return made

    def ctrl_c(self, number, frame):
        """The agent's own handler, but only while it works: a late press must not end the test."""
        if agent.interrupts.depth:
            self.pressed = True
            agent.interrupts.handle(number, frame)

    # ---- what the stand-in and the user do ----

    def answer(self, request):
        """The script: the next answer, and the Ctrl-C that goes with it."""
        self.looking += 1
        try:
            self.look_at(request)
        finally:
            self.looking -= 1
        if len(self.api.requests) - self.before > MAX_REQUESTS:
            return Fault(401)  # too many: the check will say so
        sent = json.dumps(request.messages, ensure_ascii=False)
        if self.is_strict and BAD in sent:
            return Fault(400, "this content is against our rules")
        if self.window and len(sent) // 4 > self.window:
            return self.overflow
        if is_summary(request):
            item, press = self.summaries.pop(0) if self.summaries else (Reply("A summary."), None)
        else:
            item, press = self.answers.pop(0) if self.answers else (self.last, None)
            item = self.numbered(item)
            self.served.append(item)
        if press is not None and not self.timers:  # once a prompt: the first one ends it
            main = threading.main_thread().ident
            self.timers.append(threading.Timer(press, signal.pthread_kill, (main, signal.SIGINT)))
            self.timers[0].start()
        return item

    def numbered(self, item):
        """The reply with texts that are not like any other."""
        if isinstance(item, Fault):
            return item
        item = copy.copy(item)
        number = len(self.api.requests)
        item.blocks = [
            text(f"Text {number}.{i}: {block['text']}") if block.get("text", "").strip() else block
            for i, block in enumerate(item.blocks)
        ]
        return item

    def look_at(self, request):
        """What must be on disk when a request comes in: all that it says, all that was typed."""
        is_lost = self.is_lost()
        if is_lost:
            self.was_lost = True
            self.seen.clear()
            self.outputs.clear()
        disk = transcripts_of(self.cwd)
        for block, words in logged(request):
            known = f'"id": "{block["id"]}"' if block["type"] == "tool_use" else as_logged(words)
            if known not in self.seen and known not in disk:
                self.faults.append(f"not on disk: {block}")
            self.seen.add(known)
        for words in self.words:
            if as_logged(words) not in disk and words not in self.gone:
                self.faults.append(f"not on disk: the prompt {words}")
        self.note_outputs(request, is_lost)
        if (self.cwd / ".transcripts").is_dir():
            (self.cwd / ".transcripts" / "marker").touch()

    def note_outputs(self, request, is_lost):
        """Remember which long outputs must be in files: those that are new."""
        for made, result in agent.calls_with_results(request.messages):
            output = OUTPUTS.get(made["input"].get("command"))
            is_whole = result["content"].endswith("[exit status 0]")
            if output and is_whole and not is_lost and made["id"] not in self.ended:
                self.outputs[made["id"]] = output
            self.ended.add(made["id"])

    def is_lost(self):
        """Did the record go away since the last request?"""
        return not (self.cwd / ".transcripts" / "marker").exists()

    def press_no_more(self):
        for timer in self.timers:
            timer.cancel()
            timer.join()

    def play(self, prompt, answers, for_ever, summaries, permission, line, afterwards):
        """One prompt, whatever happens to it, and then perhaps something between two prompts."""
        for_ever = for_ever and getattr(answers[0][0], "end", "") != "stall"
        self.last = answers[0][0] if for_ever else Reply("The end.")
        self.answers = [] if for_ever else list(answers)
        self.summaries = list(summaries)
        if any(getattr(item, "end", "") == "stall" for item, _ in answers):
            line = 0  # what stalls has its own Ctrl-C, and only one ends a prompt

        def allow(_):
            if permission == "interrupt":
                signal.raise_signal(signal.SIGINT)
            return agent.Verdict(permission != "no", "no")

        self.agent.allow = allow
        self.type(prompt, line)
        self.check()
        until(lambda: not self.looking)
        if "lose" in afterwards:
            shutil.rmtree(self.cwd / ".transcripts", ignore_errors=True)
        if "compact" in afterwards:
            with suppress(KeyboardInterrupt):
                agent.compact_now(self.agent, "")
        self.press_no_more()
        if afterwards == "resume":
            self.start_again()
        if afterwards != "nothing":
            self.check_view()

    def type(self, prompt, line=0):
        """One prompt, to its end. Returns the answer; "" if there is none."""
        until(lambda: not self.looking)  # at a request that Ctrl-C has left behind
        self.served = []
        self.timers = []
        self.pressed = False
        self.was_lost = False  # did the record go away in this prompt?
        self.before = len(self.api.requests)
        self.shown = len(said(self.agent))
        self.end = None
        answer = ""
        self.words.append(agent.plain(prompt))
        self.states = {agent.plain(p.text): p.state for p in self.agent.prompts}
        try:
            with ctrl_c_at_line(line):
                answer = self.agent.run(prompt)
        except (agent.Stopped, KeyboardInterrupt) as end:
            self.end = end
        return answer

    def start_again(self):
        """A new start with the same conversation, as -c does it."""
        old = self.agent
        if not old.transcript.path.exists():
            return
        self.agent = self.new_agent()
        agent.resume(self.agent, old.transcript.id)
        if self.is_lost():
            self.words = [prompt.text for prompt in self.agent.prompts]
            results = agent.all_blocks(self.agent.messages, "tool_result")
            self.lost |= {block["tool_use_id"] for block in results}
        else:
            assert states_of(self.agent) == states_of(old)
            assert self.agent.messages == agent.without_thinking(old.messages)

    def is_alive(self):
        """In the end a plain prompt is answered, if need be after one /compact."""
        self.last = Reply("The end.")
        self.answers, self.summaries = [], []
        self.agent.allow = lambda _: agent.Verdict(True)
        ends = []
        for number in range(6):
            answer = self.type(f"Are you there? ({number})")
            self.check()
            if answer:
                return True
            ends.append(str(self.end))
            if number % 3 == 2:
                agent.compact_now(self.agent, "")
        raise AssertionError(ends)

    # ---- what must be true after it ----

    def check(self):
        assert self.api.refused == []
        assert self.faults == []
        assert len(self.api.requests) - self.before <= MAX_REQUESTS
        self.ctrl_c_ends_it()
        self.prompts_have_states()
        self.check_view()
        if not self.is_lost():
            if not self.was_lost:  # what was in no view any more went with it
                self.replies_are_on_disk()
            self.outputs_are_on_disk()
        assert until(lambda: not processes(MARK)), "a process of a stopped call is left"
        assert until(self.little_is_open), (self.used[0], self.used[-1])

    def check_view(self):
        self.words_are_kept()
        self.calls_are_answered()

    def ctrl_c_ends_it(self):
        """No press is lost, and what holds signals back lets go."""
        assert not agent.interrupts.are_held and agent.interrupts.depth == 0
        assert isinstance(self.end, KeyboardInterrupt) == self.pressed

    def prompts_have_states(self):
        """The newest is done, stopped or open; or the server has refused it, and that is said."""
        prompts = {agent.plain(prompt.text): prompt.state for prompt in self.agent.prompts}
        gone = {words for words in self.words if words not in prompts} - self.gone
        if gone:
            assert "left the conversation" in said(self.agent)[self.shown :]
            assert "done" not in [self.states.get(words) for words in gone]
            self.gone |= gone
        if self.end is None:
            assert set(prompts.values()) <= {"done", "stopped"}
            assert prompts[self.words[-1]] == "done"
        elif self.pressed:
            assert "open" not in prompts.values()
        elif self.words[-1] in prompts:
            assert prompts[self.words[-1]] == "open"

    def words_are_kept(self):
        """What was typed would be sent now: whole, or cut with the address of the rest."""
        view = "\n".join(
            block["text"]
            for message in agent.repaired(self.agent.messages)
            for block in agent.all_blocks([message], "text")
            if message["role"] == "user"
        )
        lines = view.replace("\n| ", "\n")
        names = set(re.findall(r"the whole is in (\S+?\.jsonl) \.\.\.\]", view))
        for words in self.words:
            if words not in self.gone and "\n".join(words.splitlines()) not in lines:
                assert names
                whole = transcripts_of(self.cwd)
                assert self.is_lost() or as_logged(words) in whole

    def calls_are_answered(self):
        """Once each. (Where a result was refused, its call stays, and the model is told.)"""
        messages = self.agent.messages
        calls = {block["id"] for block in agent.all_blocks(messages, "tool_use")}
        results = agent.all_blocks(messages, "tool_result")
        answers = Counter(block["tool_use_id"] for block in results)
        if "left the conversation" in said(self.agent)[self.shown :]:
            self.lost |= calls - answers.keys()
        assert calls - self.lost <= answers.keys() <= calls | self.lost
        assert set(answers.values()) <= {1}

    def replies_are_on_disk(self):
        """What was on the screen of each reply, also of one that was not taken."""
        disk = transcripts_of(self.cwd)
        screen = said(self.agent)[self.shown :]
        for reply in self.served:
            for block in getattr(reply, "blocks", []):
                if block.get("text", "").startswith("Text "):
                    shown = shown_part(block["text"], screen)
                    assert as_logged(shown) in disk or len(shown) < 12

    def outputs_are_on_disk(self):
        """A long output is whole in a file, byte by byte."""
        for name, output in self.outputs.items():
            paths = self.cwd.glob(f".transcripts/*/{name}.txt")
            assert output in [path.read_bytes() for path in paths]

    def little_is_open(self):
        """As much as after the very first prompt."""
        self.used.append(resources())
        pairs = zip(self.used[0], self.used[-1], strict=True)
        return all(now <= first + 3 for first, now in pairs)

    def close(self):
        self.press_no_more()
        for process in processes(MARK):  # the next example is not to find it, too
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(self.cwd)
        self.api.requests.clear()
        self.api.refused.clear()


@pytest.fixture
def stage(tmp_path):
    """A stand-in whose script can be changed, and a client that never waits for ever."""
    before = signal.getsignal(signal.SIGINT)
    with MessagesAPI(lambda request: api.script(request)) as api:
        client = make_agent(api, tmp_path).model.connect().with_options(timeout=60)
        yield api, client
        client.close()
    signal.signal(signal.SIGINT, before)


# A Ctrl-C in the garbage collector is only reported.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_any_conversation_is_valid_and_complete_and_goes_on(stage, threshold):
    api, client = stage
    used = []

    @settings(
        max_examples=max(EXAMPLES // len(THRESHOLDS), 1),
        deadline=None,
        report_multiple_bugs=False,
        phases=set(Phase) - {Phase.explain},
        suppress_health_check=list(HealthCheck),
    )
    @given(server=SERVERS, prompts=st.lists(PROMPTS, min_size=1, max_size=4))
    def converse(server, prompts):
        conversation = Conversation(api, client, threshold, server, used)
        api.script = conversation.answer
        try:
            for number, (words, *rest) in enumerate(prompts):
                conversation.play(f"{words} #{number}", *rest)
            assert conversation.is_alive()
        except BaseException:
            used.clear()  # hypothesis keeps the traceback, and with it what was open
            raise
        finally:
            conversation.close()

    converse()
