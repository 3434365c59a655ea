"""The agent as a whole and layer 1 as a function: a long conversation, the lesson's rule, import, promises."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tokenize
from contextlib import suppress

import pytest
from harness import ROOT, agent, ask, command, environment, results, run, said, session, texts
from messages_api import Fault, Reply, call, is_summary, text, thinking

RULE = "Rule of the house: never touch the file KEEP.me, whatever else you do."


def long_conversation(compact_at):
    """A script of 60 tool calls, each with an output of its own; at one of them the compact tool comes along."""
    done = 0

    def script(request):
        nonlocal done
        if is_summary(request):
            return f"Summary after {done} calls. Nothing of note."
        done += 1
        if done > 60:
            return "All 60 are done."
        words = text(f"Step {done}. " + "I look at the next part of the numbers and think about it. " * 15)
        calls = [call("bash", {"command": f"echo OUTPUT-{done}; seq {done}000 {done}219"})]
        return Reply(words, *calls, *([call("compact", {"focus": "the colour of step 33"})] if done == compact_at else []))

    return script


def test_sixty_calls_and_four_compactions_send_no_invalid_request(serve, tmp_path):
    """With layer 1 acting every turn and the model thinking in every reply."""
    api = serve(long_conversation(8))
    s = session(api, tmp_path, threshold=7_000, clear_at_least=0, keep_recent=1)
    s.add("user", RULE)
    assert ask(s, "Look at all 60 parts.") == "All 60 are done."
    shown = said(s)
    assert shown.count("[auto_compact: ") >= 4 and "[micro_compact: " in shown
    assert api.thinking_checked > 0

    cleared = {}
    for request in api.requests:
        for result in results(request.messages):
            if result["content"].startswith("[Previous: used bash: echo OUTPUT-"):
                number, address = re.search(r"OUTPUT-(\d+);.*whole output in (\S+)\]", result["content"]).groups()
                assert cleared.setdefault(number, result["content"]) == result["content"]  # the same bytes ever after
                whole = (tmp_path / address).read_text()
                assert whole.startswith(f"OUTPUT-{number}\n{number}000\n") and f"\n{number}219\n" in whole
    assert len(cleared) >= 50
    assert sum("the colour of step 33" in texts(request.messages[-1:]) for request in api.requests) == 1
    assert RULE in texts(api.requests[-1].messages) and "Look at all 60 parts." in texts(api.requests[-1].messages)
    assert max(len(json.dumps(request.body["messages"])) // 4 for request in api.requests) < 1.2 * 7_000


def test_thinking_stays_until_something_before_it_changes(serve, tmp_path):
    api = serve([Reply(call("bash", {"command": f"seq {n} {n + 9}"})) for n in range(8)] + ["done"])
    assert ask(session(api, tmp_path), "count") == "done"
    kinds = [[block["type"] for message in request.messages if message["role"] == "assistant"
              for block in message["content"]].count("thinking") for request in api.requests]
    assert kinds == list(range(9))


# The conversation that the lesson is about: five results of 200 characters and one of 50, then the newest three.

def conversation(sizes, name="bash", key="command", thinks=True):
    messages = [{"role": "user", "content": "go"}]
    for i, size in enumerate(sizes):
        thought = [{"type": "thinking", "thinking": "", "signature": f"s{i}"}] if thinks else []
        use = {"type": "tool_use", "id": f"t{i}", "name": name, "input": {key: f"file{i}"}}
        messages.append({"role": "assistant", "content": [*thought, use]})
        result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": "x" * size}
        messages.append({"role": "user", "content": [result]})
    return [*messages, {"role": "assistant", "content": [text("hm")]}]


def contents(messages):
    return [result["content"] for result in results(messages)]


def test_by_default_layer_one_is_that_of_the_lesson():
    messages = conversation([200, 200, 50, 200, 200, 200, 200])
    before = json.dumps(messages)
    view = agent.micro_compact(messages)
    assert json.dumps(messages) == before  # a pure function
    kept = contents(view)
    assert [content.startswith("[Previous: used bash") for content in kept] == [True, True, False, True] + [False] * 3
    assert kept[2] == "x" * 50 and kept[4:] == ["x" * 200] * 3
    assert "thinking" in [block["type"] for block in view[1]["content"]]  # it stands before the first change
    assert "thinking" not in [block["type"] for message in view[3:] for block in message["content"]]
    stripped = [{**m, "content": [b for b in m["content"] if b["type"] != "thinking"]} for m in messages[3:]]
    assert [[b for b in m["content"] if b["type"] != "tool_result"] for m in view[3:]] == [
        [b for b in m["content"] if b["type"] != "tool_result"] for m in stripped]


def test_what_was_cleared_is_never_touched_again():
    once = agent.micro_compact(conversation([5000] * 6))
    assert agent.micro_compact(once) is once


def test_nothing_is_cleared_for_less_than_the_batch():
    messages = conversation([4000] * 6)
    assert agent.micro_compact(messages, clear_at_least=3100) is messages
    assert contents(agent.micro_compact(messages, clear_at_least=2800))[0].startswith("[Previous: used ")


def test_the_newest_reading_of_a_file_stays_until_the_file_changes():
    messages = conversation([4000] * 6, "read_file", "path")
    kept = [not content.startswith("[Previous") for content in contents(agent.micro_compact(messages, 1, keep_files=3))]
    assert kept == [False, False, False, True, True, True]
    edit = {"type": "tool_use", "id": "e", "name": "edit_file", "input": {"path": "file4"}}
    messages[-1:] = [{"role": "assistant", "content": [edit]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "e", "content": "Edited."}]},
                     {"role": "assistant", "content": [text("hm")]}]
    kept = [not content.startswith("[Previous") for content in contents(agent.micro_compact(messages, 1, keep_files=3))]
    assert kept == [False, False, True, True, False, True, True]


def test_without_an_address_nothing_is_forgotten():
    messages = conversation([4000] * 6)
    assert agent.micro_compact(messages, address=lambda result: None) is messages
    view = agent.micro_compact(messages, address=lambda result: f"there/{result['tool_use_id']}")
    assert contents(view)[0] == "[Previous: used bash: file0. 4,000 characters, whole output in there/t0]"


def test_what_the_model_has_not_seen_and_errors_stay():
    messages = conversation([4000] * 3)
    messages[2]["content"][0]["is_error"] = True
    calls = [{"type": "tool_use", "id": f"p{i}", "name": "bash", "input": {"command": "ls"}} for i in range(8)]
    messages[-1:] = [{"role": "assistant", "content": calls}] + [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"p{i}", "content": "y" * 4000}]}
        for i in range(8)]
    kept = [not content.startswith("[Previous") for content in contents(agent.micro_compact(messages))]
    assert kept == [True, False, False] + [True] * 8


def test_the_estimate_counts_bytes():
    assert agent.estimate_tokens("a" * 4000) == 1000
    assert agent.estimate_tokens("字" * 4000) == 3000


def test_a_tool_from_outside_is_asked_for_shown_logged_and_cleared(serve, tmp_path):
    """One row and one function, as the README shows it."""
    def run_append(session: "agent.Session", path: "str", line: "str") -> "str":
        """Append a line to a file."""
        with agent.safe_path(path, session.cwd).open("a") as file:
            file.write(line + "\n")
        return f"Appended to {path}. " + "It is longer now. " * 90

    agent.add_tool("append_line", run_append, "path", "changes")
    try:
        api = serve([Reply(call("append_line", {"path": f"log{n}.txt", "line": "hello"})) for n in range(5)] + ["done"])
        asked = []
        s = session(api, tmp_path, clear_at_least=0, allow=lambda name, args: asked.append((name, args)) or "")
        assert ask(s, "log") == "done"
    finally:
        agent.TOOLS.pop(), agent.TOOL_ROWS.pop("append_line"), agent.TOOL_HANDLERS.pop("append_line")
    assert asked == [("append_line", {"path": f"log{n}.txt", "line": "hello"}) for n in range(5)]
    assert (tmp_path / "log0.txt").read_text() == "hello\n" and "> append_line: log4.txt" in said(s)
    assert contents(api.requests[-1].messages)[0].startswith("[Previous: used append_line: log0.txt. ")


def test_two_sessions_side_by_side_have_nothing_in_common(serve, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = session(serve([Reply(call("bash", {"command": "pwd"})), "1"]), tmp_path / "one")
    two = session(serve([Reply(call("write_file", {"path": "x", "content": "2"})), "2"]), tmp_path / "two",
                  allow=lambda name, args: "not here")
    assert (ask(one, "where?"), ask(two, "write")) == ("1", "2")
    assert results(one.messages)[0]["content"].startswith(str(tmp_path / "one"))
    assert results(two.messages)[0]["content"] == "Not run: not here" and not (tmp_path / "two" / "x").exists()


def test_a_session_without_an_allow_function_may_only_read(serve, tmp_path):
    (tmp_path / "f").write_text("hello")
    api = serve([Reply(call("read_file", {"path": "f"}), call("bash", {"command": "touch g"})), "done"])
    s = agent.Session(agent.Settings(base_url=api.url), cwd=tmp_path)
    assert ask(s, "look") == "done"
    assert [result["content"][:8] for result in results(s.messages)] == ["hello", "Not run:"]


def test_importing_does_nothing(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import agent; print([m for m in ('anthropic', 'dotenv') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, env=environment(None), capture_output=True, text=True)
    assert (done.stdout, done.stderr, list(tmp_path.iterdir())) == ("[]\n", "", [])


def test_help_and_version_import_nothing_heavy(tmp_path):
    (tmp_path / "anthropic.py").write_text("raise SystemExit('imported')")
    (tmp_path / "dotenv.py").write_text("raise SystemExit('imported')")
    for option, expected in (("--help", "usage: agent.py"), ("--version", f"agent.py {agent.__version__}")):
        done = run(None, tmp_path, option, PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(expected)


def test_the_file_keeps_its_promise():
    lines = (ROOT / "agent.py").read_text().splitlines()
    assert len(lines) < 1000
    assert [number for number, line in enumerate(lines, 1) if len(line) > 110] == []
    banners = [int(found[1]) for line in lines if (found := re.match(r"# =+ (\d+) ", line))]
    picture = {int(number) for number in re.findall(r"\[(\d+)\]", agent.__doc__)}
    assert banners == list(range(1, 11)) and picture == set(banners)


@pytest.mark.parametrize("name", ["agent.py", "README.md", ".env.example", "tests/demo.py"])
def test_no_file_is_anything_but_utf8_text(name):
    (ROOT / name).read_bytes().decode("utf-8")
    if name.endswith(".py"):
        with tokenize.open(ROOT / name) as file:
            assert "\t" not in file.read()


# What attackers found.

def test_a_complete_call_of_a_cut_reply_keeps_its_arguments(serve, tmp_path):
    """Also the thinking behind it stays bound to what was sent."""
    secret = call("bash", {"command": "echo SECRETWORD"})
    api = serve([Reply(thinking(), secret, thinking(), text("hm"), stop_reason="max_tokens"), "done"])
    s = session(api, tmp_path)
    assert ask(s, "go") == "done"
    assert [b["input"] for m in api.requests[1].messages for b in m["content"] if b["type"] == "tool_use"] == [
        {"command": "echo SECRETWORD"}]
    assert "reached the output limit" in results(api.requests[1].messages)[0]["content"]


@pytest.mark.parametrize("odd", [call("a b"), call("a" * 100), call("bash", raw="[1]"), call("bash", {"command": "echo \ud800"}),
                                 text("a \ud800 b"), call("bash", {"command": "echo 1"}, id="odd id!")])
def test_thinking_behind_a_mended_block_is_not_sent_back(serve, tmp_path, odd):
    api = serve([Reply(thinking(), odd, thinking(), call("bash", {"command": "echo 1"})), "done"])
    assert ask(session(api, tmp_path), "go") == "done"  # and no request was refused


def test_a_prompt_that_is_withdrawn_does_not_put_off_the_next_compaction(serve, tmp_path):
    def script(request):
        if is_summary(request):
            return Fault(400, "nope")
        if "x" * 500 in texts(request.messages):
            return Reply(stop_reason="refusal", thinks=False)
        return "end" if len(results(request.messages)) > 40 else Reply(call("bash", {"command": "seq 1 400"}))
    api = serve(script)
    s = session(api, tmp_path, threshold=8000, keep_recent=99, max_turns=40)
    for prompt in ("x" * 60_000, "work"):
        with suppress(agent.Stopped):
            ask(s, prompt)
    sizes = [len(json.dumps(request.messages)) // 4 for request in api.requests if not is_summary(request)]
    assert max(sizes[1:]) < 1.3 * 8000


def test_interrupted_summaries_do_not_let_the_context_grow(serve, tmp_path):
    def script(request):
        if is_summary(request):
            os.kill(os.getpid(), signal.SIGINT)
            return Reply("too late", delay=1)
        return Reply(call("bash", {"command": "seq 1 900"}))
    api = serve(script)
    s = session(api, tmp_path, threshold=6000, keep_recent=99)
    for number in range(6):
        with pytest.raises(KeyboardInterrupt):
            ask(s, f"work {number}")
    assert max(len(json.dumps(r.messages)) // 4 for r in api.requests if not is_summary(r)) < 1.2 * 6000


def test_what_was_piped_in_leaves_with_a_refused_prompt_and_holds_no_key(serve, tmp_path):
    api = serve(lambda request: Reply(stop_reason="refusal", thinks=False) if "POISON" in texts(request.messages) else "fine")
    assert run(api, tmp_path, "-p", "hello").stdout == "fine\n"
    done = run(api, tmp_path, "-c", "-p", "review", stdin="POISON sk-test-0123456789 " * 90)
    assert done.returncode == 1 and "[The model declined." in done.stderr
    assert run(api, tmp_path, "-c", "-p", "and now?").stdout == "fine\n"
    kept = [path.read_text() for path in (tmp_path / ".transcripts").rglob("*") if path.is_file()]
    assert "POISON [key removed]" in "".join(kept) and "sk-test-0123456789" not in "".join(kept)


def test_a_closed_stdout_is_no_traceback(serve, tmp_path):
    api = serve()
    line = " ".join(shlex.quote(part) for part in command("-p", "hello")) + " >&-"
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment(api), capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and len(api.requests) == 1


def test_nothing_to_compact_is_said_and_costs_no_request(serve, tmp_path):
    api = serve()
    done = run(api, tmp_path, stdin="/compact\nhello\n/compact\n")
    assert done.stdout.count("There is nothing to compact yet") == 2 and len(api.requests) == 1
