"""Random conversations against the strict stand-in: whatever happens, every request is valid and no word is lost.

A few dozen by default; `AGENT_EXAMPLES=2000 python -m pytest tests/test_property.py` plays as many as wanted.
"""

import json
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

from harness import agent, session
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages_api import Fault, MessagesAPI, Reply, call, is_summary, redacted, text, thinking

EXAMPLES = int(os.environ.get("AGENT_EXAMPLES", "40"))
WORDS = st.sampled_from(["", "  \n", "hello", "naïve 你好 😀", "\ud800 alone", "long " * 900, "[Previous: used bash"])
COMMANDS = st.sampled_from(["true", "false", "echo hi", "seq 1 2000", "printf 'A\\377\\0B'", "head -c 50000 /dev/zero", "kill -9 $$"])
CALLS = st.one_of(
    COMMANDS.map(lambda command: call("bash", {"command": command})),
    st.sampled_from(["f", "g/h", "../out", "", "."]).map(lambda path: call("read_file", {"path": path})),
    st.tuples(st.sampled_from(["f", "g/h", "../out"]), WORDS).map(
        lambda args: call("write_file", {"path": args[0], "content": args[1]})),
    st.just(call("edit_file", {"path": "f", "old_text": "hello", "new_text": "goodbye"})),
    st.sampled_from([{}, {"focus": "f"}, {"focus": 7}]).map(lambda args: call("compact", args)),
    st.sampled_from(["Bash", "", "a b"]).map(lambda name: call(name, {"x": 1})),
    st.sampled_from(['{"command": "tr', "[1]", "null", '"text"', '{"command": NaN}']).map(lambda raw: call("bash", raw=raw)),
    st.sampled_from(["same", "odd id!", "x" * 80]).map(lambda name: call("bash", {"command": "echo 1"}, id=name)),
)
BLOCKS = st.one_of(WORDS.map(text), CALLS, st.just({"type": "brand_new", "x": 1}), st.builds(thinking), st.builds(redacted))
REPLIES = st.builds(
    lambda blocks, stop, end: Reply(blocks, stop_reason=stop, end=end),
    st.lists(BLOCKS, max_size=4),
    st.sampled_from(["auto"] * 12 + ["end_turn", "tool_use", "max_tokens", "pause_turn", "refusal", "stop_sequence", None,
                                     "model_context_window_exceeded"]),
    st.sampled_from(["stop"] * 12 + ["no_stop", "no_reason", "reset", "error", "llama", "garbage"]),
)
FAULTS = st.sampled_from([
    Fault(429, headers={"retry-after": "0"}), Fault(429, headers={"retry-after": "86400"}), Fault(500), Fault(529), Fault(0),
    Fault(400, "prompt is too long: 9 tokens > 8 maximum"), Fault(400, "no"), Fault(401), Fault(502, body="<html>x</html>"),
    Fault(200, body="<html>", content_type="text/html"), Fault(400, "messages.1: Invalid `signature` in `thinking` block"),
])
STEPS = st.lists(st.one_of(REPLIES, REPLIES, REPLIES, FAULTS), min_size=1, max_size=14)
EVENTS = st.sampled_from(["nothing"] * 8 + ["interrupt", "refuse", "compact", "resume"])


def on_disk(cwd: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in (cwd / ".transcripts").glob("*.jsonl"))


def play(s, prompt, event):
    """One prompt, and what a person may do meanwhile or afterwards. Returns the session to go on with."""
    asked = []

    def allow(name, args):
        asked.append(name)
        if event == "interrupt" and len(asked) == 2:
            signal.raise_signal(signal.SIGINT)
        return "no" if event == "refuse" else ""

    s.allow = allow
    s.add("user", prompt)
    try:
        agent.agent_loop(s)
        if event == "compact":
            agent.auto_compact(s, "whatever")
    except (agent.Stopped, KeyboardInterrupt):
        pass
    if event == "resume":
        fresh = session(s.api, s.cwd, threshold=s.settings.threshold, clear_at_least=0)
        fresh.api = s.api
        try:
            agent.resume(fresh)
        except agent.Stopped:  # nothing to go on with: the only prompt there was has been refused
            assert not s.messages
        return fresh
    return s


@settings(max_examples=EXAMPLES, deadline=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
@given(prompts=st.lists(st.tuples(WORDS.filter(str.strip), STEPS, EVENTS), min_size=1, max_size=4),
       threshold=st.sampled_from([0, 2_000, 4_000, 100_000]), summary=st.sampled_from(["A summary.", "", "x" * 60_000]))
def test_any_conversation_is_valid_and_complete(prompts, threshold, summary):
    cwd = Path(tempfile.mkdtemp())
    steps = []
    script = lambda request: summary if is_summary(request) else steps.pop(0) if steps else "The end."  # noqa: E731
    threads = threading.active_count()
    try:
        with MessagesAPI(script) as api:
            s = session(api, cwd, threshold=threshold, clear_at_least=0)
            s.api = api
            for number, (words, items, event) in enumerate(prompts):
                steps[:] = items
                before, prompt = len(api.requests), f"{words} #{number}"
                s = play(s, prompt, event)
                assert api.refused == []
                assert len(api.requests) - before <= 4 * (len(items) + 1) + 30
                kept = on_disk(cwd)
                assert json.dumps(agent.plain(prompt), ensure_ascii=False)[1:-1] in kept
                for message in s.messages:
                    for block in agent.blocks(message):
                        if block["type"] == "text" and message["role"] == "assistant":
                            assert json.dumps(block["text"], ensure_ascii=False)[1:-1] in kept
            if s.client:
                s.client.close()
        assert threading.active_count() <= threads + 4
    finally:
        shutil.rmtree(cwd)
