"""Public bug reports about invalid histories, as black-box cases: whatever happens, the next request is one
that the API accepts. That no request was refused is asserted by `serve`, at the end of every test here."""

import json
import os
import re
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import PROMPT, agent, ask, processes, results, run, said, session, terminal, texts
from messages_api import Fault, Reply, call, is_summary, redacted, text, thinking

OLD_FILE = "".join(f"line_{n} = {n}\n" for n in range(300))
BRAND_NEW = {"type": "brand_new", "x": 1}
EMPTY_ENDINGS = {
    "no blocks": Reply(thinks=False),
    "no blocks, but the reason says calls": Reply(stop_reason="tool_use", thinks=False),
    "thinking alone": Reply(thinking("")),
}


def last_text(request):
    content = request.messages[-1]["content"]
    return content if isinstance(content, str) else content[-1].get("text", "")


def assert_alive(s, api):
    """One more prompt is a valid request that ends with it, and its answer comes back."""
    before = len(api.requests)
    assert ask(s, "are you still there?") == "ok"
    assert len(api.requests) == before + 1
    assert last_text(api.requests[-1]) == "are you still there?"


def fails(s, prompt):
    """Ask something that gets no answer: the one line that says why."""
    with pytest.raises(agent.Stopped) as stopped:
        ask(s, prompt)
    assert "\n" not in str(stopped.value)
    return str(stopped.value)


def wait_for(path):
    for _ in range(400):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path.name} did not appear")


@contextmanager
def interrupt_once(path):
    """Ctrl-C for this process as soon as the file is there; none after the block."""
    over = threading.Event()

    def watch():
        while not over.wait(0.05):
            if path.exists():
                time.sleep(0.3)
                if not over.is_set():
                    os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def without_privileges():
    """Root sees through every file mode: be another user for a while."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# 1-1


def test_an_interrupted_command_is_answered_and_dead(serve, tmp_path):
    """Case 1-1."""
    command = call("bash", {"command": "touch started; sleep 41.731; touch late"})
    api = serve([Reply(command), "the second answer"])
    child = terminal(api, tmp_path, "-y", NO_COLOR="1")
    child.sendline("begin")
    wait_for(tmp_path / "started")
    assert processes("sleep 41.731")
    child.sendintr()
    child.expect_exact(PROMPT)
    assert processes("sleep 41.731") == []
    child.sendline("carry on")
    child.expect_exact("the second answer")
    child.expect_exact(PROMPT)
    child.sendline("exit")
    child.wait()
    assert child.exitstatus == 0
    assert len(api.requests) == 2
    [result] = results(api.requests[1].messages)
    assert "interrupted" in result["content"].lower()
    for lie in ("not run", "never", "refus", "user said no", "exit status"):
        assert lie not in result["content"].lower()
    assert [block["type"] for block in api.requests[1].messages[-1]["content"]] == ["tool_result", "text"]
    assert last_text(api.requests[1]) == "carry on"
    assert not (tmp_path / "late").exists()


def test_an_interrupted_command_keeps_what_it_printed_and_the_rest_of_the_batch_is_not_run(serve, tmp_path):
    """Case 1-1, inside of a batch."""
    batch = [
        call("bash", {"command": "echo before > first; echo done"}, id="toolu_first"),
        call(
            "bash", {"command": "echo half-way; touch started; sleep 41.732; touch late"}, id="toolu_second"
        ),
        call("bash", {"command": "touch third"}, id="toolu_third"),
    ]
    api = serve([Reply(batch)])
    s = session(api, tmp_path)
    with interrupt_once(tmp_path / "started"), pytest.raises(KeyboardInterrupt):
        ask(s, "begin")
    assert processes("sleep 41.732") == []
    assert_alive(s, api)
    first, second, third = results(api.requests[1].messages)
    assert [r["tool_use_id"] for r in (first, second, third)] == [
        "toolu_first",
        "toolu_second",
        "toolu_third",
    ]
    assert "done" in first["content"] and "interrupted" not in first["content"].lower()
    assert "half-way" in second["content"] and "interrupted" in second["content"].lower()
    assert "not run" in third["content"].lower() and not (tmp_path / "third").exists()
    assert not (tmp_path / "late").exists()


# 1-3

BLANKS = [Reply("", call("bash", {"command": "echo hi"})), Reply("\n\n"), "all good again", "went on"]


def assert_no_blanks(api):
    assert len(api.requests) == 4  # the prompt, the result, the one request to go on, the last prompt
    for request in api.requests:
        for message in request.messages:
            assert message["content"]
            for block in [] if isinstance(message["content"], str) else message["content"]:
                assert block["type"] != "text" or block["text"].strip()
    assert last_text(api.requests[3]) == "go on"
    assert "hi\n" in results(api.requests[3].messages)[0]["content"]


def test_blank_texts_and_blank_prompts_are_never_sent(serve, tmp_path):
    """Case 1-3, at a terminal."""
    api = serve(BLANKS)
    child = terminal(api, tmp_path, "-y", NO_COLOR="1")
    child.sendline("start")
    child.expect_exact("all good again")
    for blank in ("", "   "):
        child.expect_exact(PROMPT)
        child.sendline(blank)
    child.expect_exact(PROMPT)
    child.sendline("go on")
    child.expect_exact("went on")
    child.expect_exact(PROMPT)
    child.sendline("exit")
    child.wait()
    assert_no_blanks(api)


def test_blank_lines_on_a_pipe_are_no_prompts(serve, tmp_path):
    """Case 1-3, on a pipe."""
    api = serve(BLANKS)
    done = run(api, tmp_path, "-y", stdin="start\n\n   \n\t\ngo on\n")
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr
    assert "all good again" in done.stdout and "went on" in done.stdout
    assert_no_blanks(api)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("blank", ["", " ", "\n\n", "\t \n"])
def test_blank_text_from_the_model_never_comes_back(serve, tmp_path, thinks, blank):
    """Case 1-3: blank text before, beside and after a call, and alone."""
    one, two = (call("bash", {"command": f"echo {word}"}) for word in ("uno", "due"))
    api = serve(
        [
            Reply(blank, one, thinks=thinks),
            Reply("said", blank, two, blank, thinks=thinks),
            Reply(blank, thinks=thinks),
            "fine",
        ]
    )
    s = session(api, tmp_path)
    assert ask(s, "start") == "fine"
    assert_alive(s, api)
    assert len(api.requests) == 5
    assert [
        "uno" in results(api.requests[-1].messages)[0]["content"],
        "due" in results(api.requests[-1].messages)[1]["content"],
    ] == [True, True]
    for message in api.requests[-1].messages:
        for block in [] if isinstance(message["content"], str) else message["content"]:
            assert block["type"] != "text" or block["text"].strip()


# 1-4


def test_a_silent_command_still_has_a_result(serve, tmp_path):
    """Case 1-4."""
    api = serve([Reply(call("bash", {"command": command})) for command in ("true", "false", "exit 3")])
    s = session(api, tmp_path)
    assert ask(s, "run them") == "ok"
    found = results(api.requests[3].messages)
    assert len(found) == 3
    for result, status in zip(found, (0, 1, 3)):
        assert f"exit status {status}" in result["content"]
        assert not result.get("is_error")  # the call itself could be done
    assert len({result["content"] for result in found}) == 3


def test_three_silent_commands_in_one_reply_have_a_result_each(serve, tmp_path):
    """Case 1-4, as one batch."""
    api = serve([Reply([call("bash", {"command": command}) for command in ("true", "exit 4", "kill -9 $$")])])
    ask(session(api, tmp_path), "run them")
    zero, four, killed = (result["content"] for result in results(api.requests[1].messages))
    assert "exit status 0" in zero and "exit status 4" in four
    assert re.search(r"SIGKILL|signal 9", killed) and "exit status" not in killed


# 1-5


@pytest.mark.parametrize(
    "arguments",
    [
        json.dumps({"path": "f.py", "content": "".join(OLD_FILE.splitlines(True)[:20])}),
        '{"path": "f.py"}',
        '{"path": "f.py", "content": "line_0 = 0\\nline_1',
        '{"pa',
        "",
    ],
)
def test_a_call_in_a_reply_that_was_cut_is_not_run(serve, tmp_path, arguments):
    """Case 1-5: the arguments complete, one missing, broken off in the middle, hardly begun, not begun."""
    (tmp_path / "f.py").write_text(OLD_FILE)
    cut = Reply("I write it.", call("write_file", raw=arguments), stop_reason="max_tokens")
    api = serve([cut, "I see."])
    s = session(api, tmp_path)
    assert ask(s, "rewrite f.py").endswith("I see.")
    assert (tmp_path / "f.py").read_text() == OLD_FILE
    assert len(api.requests) == 2
    [result] = results(api.requests[1].messages)
    assert result["is_error"] is True
    assert "limit" in result["content"] and "nothing was done" in result["content"].lower()
    assert "missing" not in result["content"].lower() and "argument" not in result["content"].lower()
    assert_alive(s, api)


def test_words_beside_a_call_that_was_cut_are_no_part_of_the_answer(serve, tmp_path):
    """Case 1-5: as with a call that was run, only what is said after it is the answer."""
    cut = Reply("I write it.", call("write_file", raw='{"path": "f.p'), stop_reason="max_tokens")
    assert ask(session(serve([cut, "I see."]), tmp_path), "write f.py") == "I see."


def test_every_call_of_a_reply_that_was_cut_is_answered_and_none_is_run(serve, tmp_path):
    """Case 1-5, with a complete call before the one that was cut off."""
    api = serve(
        [
            Reply(
                call("bash", {"command": "touch ran"}),
                call("write_file", raw='{"path": "new.txt", "con'),
                stop_reason="max_tokens",
            )
        ]
    )
    assert ask(session(api, tmp_path), "do both") == "ok"
    found = results(api.requests[1].messages)
    assert [result["is_error"] for result in found] == [True, True]
    assert not (tmp_path / "ran").exists() and not (tmp_path / "new.txt").exists()


def test_a_model_whose_calls_are_cut_for_ever_is_stopped(serve, tmp_path):
    """Case 1-5: at most three requests to go on (DESIGN, section 8)."""
    api = serve(lambda request: Reply(call("write_file", raw='{"path": "f'), stop_reason="max_tokens"))
    s = session(api, tmp_path)
    fails(s, "write it")
    assert len(api.requests) == 4
    assert all(result["is_error"] for result in results(api.requests[-1].messages))


def test_a_text_that_was_cut_is_said_to_be_cut_and_goes_on(serve, tmp_path):
    """Case 1-5, third variant, and case 1-7: what asks to go on is a user message."""
    api = serve([Reply("The first half ", stop_reason="max_tokens"), "and the second."])
    s = session(api, tmp_path)
    assert ask(s, "tell me") == "The first half and the second."
    assert "cut off" in said(s)
    assert [message["role"] for message in api.requests[1].messages] == ["user", "assistant", "user"]
    assert "The first half " in texts(api.requests[1].messages[1:2])
    assert last_text(api.requests[1]).strip() not in ("", "tell me")


def test_a_text_that_is_cut_for_ever_ends_with_all_its_parts_and_a_word_on_it(serve, tmp_path):
    """Case 1-5, third variant: asked to go on three times, then the parts are the answer, said to be cut."""
    parts = iter("abcdefgh")
    api = serve(lambda request: Reply(f"part-{next(parts)} ", stop_reason="max_tokens"))
    s = session(api, tmp_path)
    assert ask(s, "tell me") == "part-a part-b part-c part-d "
    assert len(api.requests) == 4
    assert "cut off" in said(s).splitlines()[-1]


def test_one_shot_prints_all_parts_of_a_cut_answer(serve, tmp_path):
    """Case 1-5, third variant, on a pipe: the answer whole on stdout, that it was cut on stderr."""
    api = serve([Reply("The first half ", stop_reason="max_tokens"), "and the second."])
    done = run(api, tmp_path, "-p", "tell me")
    assert done.returncode == 0
    assert done.stdout.strip() == "The first half and the second."
    assert "cut off" in done.stderr


# 1-7


def test_no_request_ends_with_the_assistant(serve, tmp_path):
    """Case 1-7: after text with blanks at its end, a cut, an empty reply, a 500 inside of a tool turn."""
    faults = [Fault(500)] * 4
    api = serve(
        [
            Reply("done  \n"),
            "two",
            Reply("cut he", stop_reason="max_tokens"),
            "re",
            "four",
            Reply(thinks=False),
            "not empty now",
            "six",
            Reply(call("bash", {"command": "echo tool-turn"})),
            *faults,
            "eight",
        ]
    )
    s = session(api, tmp_path)
    assert ask(s, "prompt 1").strip() == "done"
    assert ask(s, "prompt 2") == "two"
    assert ask(s, "prompt 3") == "cut here"
    assert ask(s, "prompt 4") == "four"
    assert ask(s, "prompt 5") == "not empty now"
    assert ask(s, "prompt 6") == "six"
    assert "500" in fails(s, "prompt 7")
    assert ask(s, "prompt 8") == "eight"
    assert [request.messages[-1]["role"] for request in api.requests] == ["user"] * len(api.requests)
    assert len(api.requests) == 8 + 1 + 1 + 4
    typed = [n for n in range(1, 9) if f"prompt {n}" in texts(api.requests[-1].messages, "user")]
    assert typed == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "tool-turn" in results(api.requests[-1].messages)[0]["content"]
    assert "prompt" not in texts(api.requests[-1].messages, "assistant")


def test_after_a_lost_tool_turn_the_results_come_before_the_new_prompt(serve, tmp_path):
    """Case 1-7: the 500 came after the tool had run; it runs once."""
    api = serve([Reply(call("bash", {"command": "echo ran >> log"})), *[Fault(500)] * 4])
    s = session(api, tmp_path)
    fails(s, "run it")
    assert_alive(s, api)
    assert [block["type"] for block in api.requests[-1].messages[-1]["content"]] == ["tool_result", "text"]
    assert (tmp_path / "log").read_text() == "ran\n"


def test_a_pause_is_ended_by_a_user_message(serve, tmp_path):
    """Case 1-7, stop reason pause_turn."""
    api = serve([Reply("half ", stop_reason="pause_turn"), "whole"])
    assert ask(session(api, tmp_path), "go") == "half whole"
    assert api.requests[1].messages[-1]["role"] == "user"


# 1-12


def test_a_failed_prompt_is_sent_again_at_most_once(serve, tmp_path):
    """Case 1-12: what the API refuses leaves the history, what failed on the way stays, once."""
    api = serve([Fault(400, "messages.0: no such thing"), *[Fault(500)] * 4, "the answer"])
    s = session(api, tmp_path)
    assert "400" in fails(s, "prompt-one")
    assert len(api.requests) == 1
    assert "500" in fails(s, "prompt-two")
    assert len(api.requests) == 1 + 4
    assert "prompt-one" not in texts(api.requests[1].messages)
    assert ask(s, "prompt-three") == "the answer"
    assert len(api.requests) == 6
    seen = texts(api.requests[5].messages)
    assert [seen.count(f"prompt-{word}") for word in ("one", "two", "three")] == [0, 1, 1]
    assert last_text(api.requests[5]) == "prompt-three"


def test_the_program_outlives_failed_requests(serve, tmp_path):
    """Case 1-12, as a process: no exit, both failures said, the third prompt answered."""
    api = serve([Fault(400, "messages.0: no such thing"), *[Fault(500)] * 4, "the answer"])
    done = run(api, tmp_path, stdin="prompt-one\nprompt-two\nprompt-three\n")
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr
    assert "the answer" in done.stdout and "no such thing" in done.stdout + done.stderr
    assert len(api.requests) == 6


@pytest.mark.parametrize(
    "fault",
    [
        Fault(0),
        Fault(529),
        Fault(429),
        Reply("half", end="reset"),
        Reply("half", end="no_reason"),
        Reply("half", end="error"),
    ],
)
def test_what_passes_is_tried_three_times_more_and_its_prompt_stays_once(serve, tmp_path, fault):
    """Case 1-12, with other faults that pass."""
    api = serve([fault] * 4)
    s = session(api, tmp_path)
    fails(s, "prompt-one")
    assert len(api.requests) == 4
    assert_alive(s, api)
    assert texts(api.requests[-1].messages).count("prompt-one") == 1
    assert "half" not in texts(api.requests[-1].messages)


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404])
def test_what_is_refused_is_not_tried_again(serve, tmp_path, status):
    """Case 1-12: a refusal is one request, and takes its prompt along."""
    api = serve([Fault(status, "certainly not")])
    s = session(api, tmp_path)
    assert str(status) in fails(s, "prompt-one")
    assert len(api.requests) == 1
    assert_alive(s, api)
    assert "prompt-one" not in texts(api.requests[-1].messages)


def test_a_refusal_in_the_middle_of_the_work_keeps_the_work(serve, tmp_path):
    """Case 1-12: a 400 after a tool turn is no reason to forget what was done."""
    api = serve([Reply(call("bash", {"command": "echo kept-work"})), Fault(400, "certainly not")])
    s = session(api, tmp_path)
    fails(s, "prompt-one")
    assert_alive(s, api)
    assert "kept-work" in texts(api.requests[-1].messages)
    assert texts(api.requests[-1].messages).count("prompt-one") == 1


# 1-8


def thoughtful(n, *rest):
    return Reply(thinking(f"thought {n}", f"signature-{n}"), redacted(f"data-{n}"), text(f"Step {n}."), *rest)


def thoughts(n):
    return [
        {"type": "thinking", "thinking": f"thought {n}", "signature": f"signature-{n}"},
        {"type": "redacted_thinking", "data": f"data-{n}"},
        {"type": "text", "text": f"Step {n}."},
    ]


def thinking_in(message):
    return [block for block in message["content"] if block["type"] in ("thinking", "redacted_thinking")]


def test_thinking_comes_back_as_it_was_sent(serve, tmp_path):
    """Case 1-8: two rich turns, one with empty thinking, ten small ones, then a compaction."""
    quiet = Reply(thinking("", "signature-quiet"), call("bash", {"command": "echo quiet"}))
    big = "head -c 6000 /dev/zero | tr '\\0' x"
    turns = [thoughtful(n, call("bash", {"command": big})) for n in (0, 1)]
    small = [Reply(call("bash", {"command": f"echo small-{n}"})) for n in range(10)]
    api = serve([*turns, quiet, *small, "done", "The summary."])
    s = session(api, tmp_path)
    assert ask(s, "begin") == "done"
    for request in api.requests[3:]:
        assert request.messages[1]["content"][:3] == thoughts(0)
        assert request.messages[3]["content"][:3] == thoughts(1)
        assert request.messages[5]["content"][0] == {
            "type": "thinking",
            "thinking": "",
            "signature": "signature-quiet",
        }
    assert agent.auto_compact(s, "")
    assert is_summary(api.requests[-1])
    earlier, summary = api.requests[-2].messages, api.requests[-1].messages
    assert summary[: len(earlier)] == earlier
    assert len(thinking_in(summary[1])) == len(thinking_in(summary[3])) == 2
    assert api.thinking_checked > 50
    assert_alive(s, api)
    assert "The summary." in texts(api.requests[-1].messages)


def test_shortening_touches_results_and_only_the_thinking_behind_them(serve, tmp_path):
    """Case 1-8. DESIGN section 4, rule 3 wins over the row: thinking behind a changed block has to go."""
    noisy = [f"seq {n}000 {n}600" for n in range(1, 6)]
    turns = [
        thoughtful(n, call("bash", {"command": command}, id=f"toolu_{n}")) for n, command in enumerate(noisy)
    ]
    api = serve([*turns, "done"])
    s = session(api, tmp_path, keep_recent=2, clear_at_least=0)
    assert ask(s, "begin") == "done"
    whole, last = {}, api.requests[-1].messages
    for request in api.requests:
        for result in results(request.messages):
            whole.setdefault(result["tool_use_id"], result["content"])
    cleared = [r["tool_use_id"] for r in results(last) if r["content"] != whole[r["tool_use_id"]]]
    assert cleared == ["toolu_0", "toolu_1", "toolu_2"]
    replies = [message["content"] for message in last if message["role"] == "assistant"]
    assert replies[0][:3] == thoughts(0)  # stands before everything that was changed
    assert [reply[0] for reply in replies[1:]] == [
        {"type": "text", "text": f"Step {n}."} for n in range(1, 5)
    ]
    assert [reply[-1]["input"]["command"] for reply in replies] == noisy
    for request in api.requests[1:3]:  # nothing is old enough yet: nothing is changed at all
        for n, message in enumerate(m for m in request.messages if m["role"] == "assistant"):
            assert message["content"][:3] == thoughts(n)


# 1-9

FIRST = {
    "thinking": [thinking("hm", "signature-first")],
    "redacted": [redacted("data-first")],
    "unknown": [BRAND_NEW],
    "unknown, then thinking": [BRAND_NEW, thinking("hm", "signature-later")],
    "thinking, then unknown": [thinking("hm", "signature-first"), BRAND_NEW],
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
@pytest.mark.parametrize("end", ["stop", "llama"])
def test_a_reply_may_begin_with_any_block(serve, tmp_path, first, end):
    """Case 1-9: known or not, the first block is no obstacle; text is shown, the tool run."""
    if end == "llama" and any(block.get("signature") for block in first):
        first = [block | {"signature": ""} if block.get("signature") else block for block in first]
    api = serve(
        [Reply(*first, "Words to see.", call("bash", {"command": "touch ran"}), thinks=False, end=end)]
    )
    s = session(api, tmp_path)
    assert ask(s, "begin") == "ok"
    assert "Words to see." in said(s) and (tmp_path / "ran").exists()
    assert "Words to see." in texts(api.requests[1].messages, "assistant")
    assert len(results(api.requests[1].messages)) == 1
    assert_alive(s, api)


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
def test_a_summary_may_begin_with_any_block(serve, tmp_path, first):
    """Case 1-9, for the reply to a request for a summary."""
    api = serve(
        ["Noted.", Reply(*first, "The gist of it.", call("bash", {"command": "touch ran"}), thinks=False)]
    )
    s = session(api, tmp_path)
    ask(s, "Remember this. " + "words " * 1500)
    assert agent.auto_compact(s, "")
    assert_alive(s, api)
    assert "The gist of it." in texts(api.requests[-1].messages)
    assert "brand_new" not in json.dumps(api.requests[-1].body) and not (tmp_path / "ran").exists()


# 1-11


def test_tools_that_fail_leave_the_rest_of_their_batch_alone(serve, tmp_path):
    """Case 1-11, as a user who may not read everything."""
    ask(session(serve(), tmp_path), "load all modules, while that is allowed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "secret.txt").write_text("hidden words")
        (folder / "secret.txt").chmod(0)
        (folder / "folder").mkdir()
        folder.chmod(0o777)
        api = serve(
            [
                Reply(
                    call("read_file", {"path": "secret.txt"}),
                    call("edit_file", {"path": "folder", "old_text": "a", "new_text": "b"}),
                    call("write_file", {"path": "/proc/version", "content": "x"}),
                    call("bash", {"command": "echo still-here"}),
                )
            ]
        )
        with without_privileges():
            s = session(api, folder)
            assert ask(s, "do all four") == "ok"
            assert_alive(s, api)
    found = results(api.requests[1].messages)
    assert [result.get("is_error", False) for result in found] == [True, True, True, False]
    assert "secret.txt" in found[0]["content"] and "denied" in found[0]["content"].lower()
    assert "folder is a directory" in found[1]["content"]
    assert "/proc/version" in found[2]["content"] and "outside" in found[2]["content"]
    assert "still-here" in found[3]["content"]
    for result in found:
        assert "\n" not in result["content"] or not result.get("is_error")
        for jargon in ("Traceback", "Errno", "Error(", "hidden words"):
            assert jargon not in result["content"]


def test_arguments_that_no_system_takes_are_errors_in_words(serve, tmp_path):
    """Case 1-11: null bytes, endless names, a loop of links, a file used as a directory."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("x")
    bad = [
        call("read_file", {"path": "a\0b"}),
        call("read_file", {"path": "n" * 5000}),
        call("read_file", {"path": "loop"}),
        call("write_file", {"path": "file/child.txt", "content": "x"}),
        call("write_file", {"path": "loop/child.txt", "content": "x"}),
        call("edit_file", {"path": "a\0b", "old_text": "a", "new_text": "b"}),
        call("bash", {"command": "echo a\0b"}),
        call("bash", {"command": "echo " + "x" * 300_000}),
    ]
    api = serve([Reply(*bad, call("bash", {"command": "echo still-here"}), chunk=100_000)])
    s = session(api, tmp_path)
    assert ask(s, "do all") == "ok"
    found = results(api.requests[1].messages)
    assert [result.get("is_error", False) for result in found] == [True] * len(bad) + [False]
    assert "still-here" in found[-1]["content"]
    for result in found[:-1]:
        assert 10 < len(result["content"]) < 6000 and "Traceback" not in result["content"]
    assert_alive(s, api)


# 1-13


@pytest.mark.parametrize("empty", EMPTY_ENDINGS.values(), ids=EMPTY_ENDINGS)
def test_an_empty_reply_is_said_and_asked_again_once(serve, tmp_path, empty):
    """Case 1-13."""
    api = serve([Reply(call("bash", {"command": "echo real-work"})), empty, empty, empty, empty, "on it"])
    s = session(api, tmp_path)
    why = fails(s, "begin")
    assert len(api.requests) == 3  # the prompt, the result, and once more with a request to go on
    assert "no answer" in why or "nothing" in why or "empty" in why
    assert sum("nothing" in line or "empty" in line for line in said(s).splitlines()) == 1
    assert last_text(api.requests[2]).strip() and last_text(api.requests[2]) != "begin"
    assert "real-work" in results(api.requests[2].messages)[0]["content"]
    fails(s, "continue")
    assert len(api.requests) == 5
    assert ask(s, "continue please") == "on it"
    for request in api.requests:
        assert all(message["content"] for message in request.messages)
    assert "real-work" in results(api.requests[-1].messages)[0]["content"]
    assert texts(api.requests[-1].messages).count("continue please") == 1


@pytest.mark.parametrize("empty", EMPTY_ENDINGS.values(), ids=EMPTY_ENDINGS)
def test_after_one_empty_reply_the_work_goes_on(serve, tmp_path, empty):
    """Case 1-13: empty once, then another call, then empty once again."""
    api = serve(
        [
            Reply(call("bash", {"command": "echo one >> log"})),
            empty,
            Reply(call("bash", {"command": "echo two >> log"})),
            empty,
            "finished",
        ]
    )
    assert ask(session(api, tmp_path), "begin") == "finished"
    assert (tmp_path / "log").read_text() == "one\ntwo\n"
    assert len(api.requests) == 5


def test_a_person_sees_that_the_model_said_nothing(serve, tmp_path):
    """Case 1-13, as a process: a line on the screen for each, the next prompt is answered, no exit."""
    api = serve([Reply(thinks=False), Reply(thinks=False), "here I am"])
    done = run(api, tmp_path, stdin="begin\ncontinue\n")
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr
    assert "[the model returned nothing]" in done.stdout and "here I am" in done.stdout
    assert len(api.requests) == 3
