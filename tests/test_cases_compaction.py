"""Public bug reports about compaction, as black-box cases: what is forgotten, when, at what price, and what
never is. That no request was refused by validation is asserted by `serve`, after every test."""

import base64
import json
import random
import re
from itertools import pairwise

import pytest
from harness import agent, ask, results, run, said, session, texts
from messages_api import Fault, Reply, call, is_summary, text, thinking

TOO_LONG = Fault(400, "prompt is too long: 9 tokens > 8 maximum")
COMPRESSED = "[Conversation compressed. Transcript: .transcripts/"


def scripted(turns, summary="The summary."):
    """A script: `turns` one after the other for the model, `summary` for every request for one."""
    turns = iter(turns)
    return lambda request: summary if is_summary(request) else next(turns, None)


def bash(command, **more):
    return call("bash", {"command": command}, **more)


def noise(size, mark=""):
    """A command that prints `size` characters, the mark first and last."""
    return f"echo {mark}; head -c {size} /dev/zero | tr '\\0' x; echo; echo {mark}"


def summaries(api):
    return [request for request in api.requests if is_summary(request)]


def work(api):
    """The requests that are not for a summary."""
    return [request for request in api.requests if not is_summary(request)]


def size(request):
    return agent.estimate_tokens([request.body["system"], request.body["tools"], request.messages])


def fixed(s):
    return agent.estimate_tokens([s.system, agent.TOOLS])


def last_text(request):
    content = request.messages[-1]["content"]
    return content if isinstance(content, str) else content[-1].get("text", "")


def first_text(request):
    content = request.messages[0]["content"]
    return content if isinstance(content, str) else content[0]["text"]


def back_to_back(api):
    return any(is_summary(one) and is_summary(two) for one, two in pairwise(api.requests))


def assert_alive(s, api):
    """One more prompt is a valid request that ends with it, and its answer comes back."""
    assert ask(s, "are you still there?") == "ok"
    assert last_text(api.requests[-1]).endswith("are you still there?")


def filled(s, tokens):
    """A prompt with which the first request has about so many tokens."""
    return "FIRSTWORDS " + "fill " * int((tokens - fixed(s)) * 4 / 5)


# 2-1


def ten_turns():
    return [Reply(bash(f"echo {n} >> log; echo turn-{n}")) for n in range(10)]


@pytest.mark.parametrize("length", [0.95, 4.0])
def test_a_summary_that_is_far_too_long_starts_no_storm(serve, tmp_path, length):
    """Case 2-1: the summary would fill the context again."""
    threshold = 12_000
    api = serve(scripted([*ten_turns(), "finished"], Reply("s" * int(length * 4 * threshold), chunk=5000)))
    s = session(api, tmp_path, threshold=threshold)
    assert ask(s, filled(s, threshold - 400)) == "finished"
    assert (tmp_path / "log").read_text().split() == [str(n) for n in range(10)]
    assert 1 <= len(summaries(api)) <= 2 and not back_to_back(api)
    assert len(work(api)) == 11
    assert max(map(size, work(api))) < 1.2 * threshold
    assert_alive(s, api)


def test_a_prompt_above_the_threshold_is_worked_on(serve, tmp_path):
    """Case 2-1, second variant: one prompt that is longer than the threshold allows."""
    threshold = 6000
    api = serve(scripted([*ten_turns(), "finished"]))
    s = session(api, tmp_path, threshold=threshold)
    assert ask(s, "BEGINNING " + "long " * threshold + "ENDING") == "finished"
    assert (tmp_path / "log").read_text().split() == [str(n) for n in range(10)]
    assert 1 <= len(summaries(api)) <= 2 and not back_to_back(api)
    for request in work(api):
        assert size(request) < 1.2 * threshold
        assert "BEGINNING long" in texts(request.messages) and "long ENDING" in texts(request.messages)
        assert ".transcripts/" in texts(request.messages)
    assert_alive(s, api)


def test_no_summary_before_the_context_has_grown_by_a_tenth(serve, tmp_path):
    """Case 2-1, DESIGN section 4, rule 6: each compaction ends at half and buys many turns."""
    threshold = 8000
    api = serve(scripted([Reply(bash(noise(700))) for _ in range(60)]))
    s = session(api, tmp_path, threshold=threshold, keep_recent=99)
    assert ask(s, "begin") == "ok"
    positions = [i for i, request in enumerate(api.requests) if is_summary(request)]
    assert len(positions) >= 2 and not back_to_back(api)
    for i in positions:
        assert size(api.requests[i + 1]) <= threshold / 2 + 200  # what is new since then: nothing but the ids
        assert size(api.requests[i]) > threshold
    assert max(map(size, work(api))) < 1.2 * threshold


# 2-2


def test_a_summary_request_that_is_too_long_is_split(serve, tmp_path):
    """Case 2-2, with the window as the row has it: a batch of six readings jumps over it."""
    for n in range(6):
        (tmp_path / f"f{n}.txt").write_text(f"MARK{n} " + "line of text\n" * 2300)
    reads = Reply([call("read_file", {"path": f"f{n}.txt"}) for n in range(6)])
    api = serve(scripted([reads, "finished"]), window=3300)
    s = session(api, tmp_path, threshold=3000)
    assert ask(s, "TASK-2: read all six") == "finished"
    assert len(summaries(api)) <= 3
    assert len([request for request in work(api) if request.status == 200]) == 2
    assert len(work(api)) <= 3  # at most once in vain
    assert "TASK-2: read all six" in texts(work(api)[-1].messages)
    assert "auto_compact: " in said(s)
    assert_alive(s, api)


def test_where_no_summary_fits_the_program_makes_one(serve, tmp_path):
    """Case 2-2: the model takes no summary request at all, yet the session goes on (DESIGN section 6)."""
    turns = [Reply(bash(noise(2000, f"MARK{n}"))) for n in range(6)]
    api = serve(scripted([*turns, "finished"], TOO_LONG))
    s = session(api, tmp_path, threshold=4000, keep_recent=99)
    assert ask(s, "TASK-2: print a lot") == "finished"
    assert 1 <= len(summaries(api)) <= 3
    assert first_text(api.requests[-1]).startswith(COMPRESSED)
    assert "TASK-2: print a lot" in texts(api.requests[-1].messages)
    assert "too long" not in texts(api.requests[-1].messages)
    assert_alive(s, api)


# 2-3


@pytest.mark.parametrize(
    "fault",
    [
        Fault(529, "FAULTWORDS"),
        Fault(500, "FAULTWORDS"),
        Fault(429, "FAULTWORDS"),
        Fault(401, "FAULTWORDS"),
        Fault(0),
        Reply("half FAULTWORDS", end="reset"),
        Reply("half FAULTWORDS", end="no_reason"),
    ],
)
def test_a_summary_that_fails_changes_nothing(serve, tmp_path, fault):
    """Case 2-3."""
    threshold = 6000
    small = [Reply(bash(f"echo small-{n}")) for n in range(4)]
    api = serve(scripted([Reply(bash(noise(4000, "NEWEST"))), *small, "finished"], fault))
    s = session(api, tmp_path, threshold=threshold)
    prompt = filled(s, threshold - 600)
    assert ask(s, prompt) == "finished"
    tries = 1 if getattr(fault, "status", 0) == 401 else 4
    assert len(summaries(api)) == tries  # one attempt, for the context has not grown by a tenth since
    assert is_summary(api.requests[1]) and not is_summary(api.requests[1 + tries])
    before, after = api.requests[1].messages[:-1], api.requests[1 + tries].messages
    assert after[0]["content"][0]["text"] == prompt and after[: len(before)] == before
    assert results(after)[0]["content"].count("NEWEST") == 2
    assert len(results(api.requests[-1].messages)) == 5
    assert "FAULTWORDS" not in json.dumps([request.messages for request in api.requests])
    assert "no summary" in said(s) and said(s).count("auto_compact") == 0
    assert_alive(s, api)


def test_after_three_failures_the_program_makes_the_summary(serve, tmp_path):
    """Case 2-3: without end a failing summary may not let the context grow (DESIGN section 6)."""
    threshold = 8000
    turns = [Reply(bash(noise(1500, f"MARK{n:02}"))) for n in range(24)]
    api = serve(scripted([*turns, "finished"], Fault(401, "FAULTWORDS")))
    s = session(api, tmp_path, threshold=threshold, keep_recent=99)
    assert ask(s, "TASK-3: print a lot") == "finished"
    first = next(i for i, request in enumerate(api.requests) if first_text(request).startswith(COMPRESSED))
    assert sum(map(is_summary, api.requests[:first])) == 3
    assert "TASK-3: print a lot" in texts(api.requests[first].messages)
    assert size(api.requests[first]) <= threshold / 2 + 200
    assert "FAULTWORDS" not in texts(api.requests[-1].messages)
    assert said(s).count("no summary") >= 3 and said(s).count("auto_compact") >= 1


# 2-4

NO_SUMMARY = {
    "empty text": Reply(""),
    "blank text": Reply("   \n"),
    "no blocks": Reply(thinks=False),
    "thinking": Reply(thinking("so it was")),
    "a call": Reply(bash("touch marker")),
    "a refusal": Reply(stop_reason="refusal", thinks=False),
    "a refusal with words": Reply("Bad FAULTWORDS", stop_reason="refusal"),
    "cut": Reply("Half FAULTWORDS", stop_reason="max_tokens"),
    "cut in thinking": Reply(thinking("endless"), stop_reason="max_tokens"),
}


@pytest.mark.parametrize("reply", NO_SUMMARY.values(), ids=NO_SUMMARY)
def test_what_is_no_summary_replaces_nothing(serve, tmp_path, reply):
    """Case 2-4."""
    threshold = 6000
    api = serve(scripted([Reply(bash(noise(4000, "NEWEST"))), Reply(bash("echo small")), "finished"], reply))
    s = session(api, tmp_path, threshold=threshold)
    prompt = filled(s, threshold - 600)
    assert ask(s, prompt) == "finished"
    rooms = [request.body["max_tokens"] for request in summaries(api)]
    assert rooms == ([16_000, 32_000] if reply.stop_reason == "max_tokens" else [16_000])
    before, after = api.requests[1].messages[:-1], api.requests[1 + len(rooms)].messages
    assert after[: len(before)] == before and after[0]["content"][0]["text"] == prompt
    assert "FAULTWORDS" not in json.dumps([request.messages for request in api.requests])
    assert "no summary" in said(s) and "auto_compact" not in said(s)
    assert not (tmp_path / "marker").exists()
    assert_alive(s, api)


def test_words_beside_a_call_are_a_summary_and_the_call_is_not_run(serve, tmp_path):
    """Case 2-4: text beside a call counts (DESIGN section 4, rule 7)."""
    api = serve(scripted([Reply(bash(noise(4000))), "finished"], Reply("The gist.", bash("touch marker"))))
    s = session(api, tmp_path, threshold=6000)
    assert ask(s, filled(s, 5400)) == "finished"
    assert len(summaries(api)) == 1 and "The gist." in first_text(api.requests[-1])
    assert not (tmp_path / "marker").exists()
    assert "marker" not in json.dumps(api.requests[-1].messages)


# 2-5


def test_the_task_and_the_rules_outlive_a_summary_without_them(serve, tmp_path):
    """Case 2-5, and through a second and third compaction."""
    rule_one, rule_two = (
        "Never touch config/R1-RULE.",
        "Answer in French, R2-RULE. Now do TASK-77: fix it all.",
    )
    turns = [Reply(bash(noise(2000))) for _ in range(36)]
    api = serve(scripted(["Understood.", *turns, "fini"], "Some work was done."))
    s = session(api, tmp_path, threshold=8000, keep_recent=99)
    assert ask(s, rule_one) == "Understood."
    assert ask(s, rule_two) == "fini"
    assert len(summaries(api)) >= 3
    for request in api.requests[1:]:
        assert texts(request.messages, "user").count(rule_one) == 1
        assert texts(request.messages, "user").count(rule_two) == 1
    order = last_text(summaries(api)[0]).lower()
    for heading in ("task", "done", "current state", "decisions and findings", "user ruled", "next step"):
        assert heading in order
    after = api.requests[api.requests.index(summaries(api)[0]) + 1]
    assert first_text(after).startswith(COMPRESSED) and "| Some work was done." in first_text(after)
    assert first_text(after).index(rule_one) < texts(after.messages).index(rule_two)


def test_one_long_paste_does_not_push_out_ten_short_rules(serve, tmp_path):
    """Case 2-5: the words of the user share their room; what is cut is cut in the middle, with an address."""
    rules = [f"Rule {n}: RULE-{n:02} holds for ever." for n in range(10)]
    api = serve()
    s = session(api, tmp_path, threshold=8000)
    for rule in rules:
        ask(s, rule)
    ask(s, "PASTEHEAD " + "paste " * 2500 + "PASTETAIL")
    assert ask(s, "Now TASK-78, please.") == "ok"
    assert agent.auto_compact(s, "")
    assert_alive(s, api)
    seen = texts(api.requests[-1].messages, "user")
    assert [rule in seen for rule in rules] == [True] * 10
    assert "PASTEHEAD" in seen and "PASTETAIL" in seen and "Now TASK-78, please." in seen
    assert "paste " * 2500 not in seen and ".transcripts/" in seen


def test_a_steady_focus_reaches_the_summary_request(serve, tmp_path):
    """Case 2-5: what `/compact` is told to care for is in the request."""
    api = serve()
    s = session(api, tmp_path)
    ask(s, "Remember. " + "words " * 1500)
    assert agent.auto_compact(s, "the FOCUS-9 numbers")
    assert len(summaries(api)) == 1 and "the FOCUS-9 numbers" in last_text(summaries(api)[0])


# 2-6


def test_nothing_is_clipped_from_what_is_summarised(serve, tmp_path):
    """Case 2-6: a conversation far longer than any clip goes to the summary whole."""
    commands = [noise(20_000, "TAILMARK" if n == 5 else f"MIDMARK{n}") for n in range(6)]
    api = serve([Reply(bash(command)) for command in commands])
    s = session(api, tmp_path, threshold=0)
    assert ask(s, "HEADMARK: print a lot") == "ok"
    assert agent.auto_compact(s, "")
    [request] = summaries(api)
    assert request.messages[:-2] == api.requests[-2].messages[: len(request.messages) - 2]
    seen = texts(request.messages)
    assert "HEADMARK: print a lot" in seen and seen.rindex("TAILMARK") > seen.index("MIDMARK4") > 50_000
    assert [seen.count(f"MIDMARK{n}\n") for n in range(5)] == [2] * 5


def test_a_long_prompt_goes_to_its_summary_whole(serve, tmp_path):
    """Case 2-6, with the threshold crossed by the first prompt, six times over."""
    threshold, half = 3000, "many words " * 3300
    api = serve(scripted([Reply(bash(noise(1500, "TAILMARK"))), "finished"]))
    s = session(api, tmp_path, threshold=threshold)
    assert ask(s, f"HEADMARK {half} MIDMARK {half} ENDMARK") == "finished"
    assert texts(summaries(api)[0].messages).count(half) == 2
    for mark in ("HEADMARK", "MIDMARK", "ENDMARK"):
        assert mark in texts(summaries(api)[0].messages)
    assert "TAILMARK" in texts(api.requests[-1].messages)


# 2-7


@pytest.mark.parametrize("big", range(5))
def test_no_cut_parts_a_call_from_its_result(serve, tmp_path, big):
    """Case 2-7: read, read, bash, read, edit, and any one of them crosses the threshold."""
    threshold, long = 10_000, "a line of words\n" * 450
    for n in range(3):
        (tmp_path / f"f{n}.txt").write_text(f"file {n}\n" + (long if big == (0, 1, 3)[n] else ""))
    (tmp_path / "edited.txt").write_text("old words\n")
    new = "new words\n" + (long if big == 4 else "")
    chain = [
        call("read_file", {"path": "f0.txt"}),
        call("read_file", {"path": "f1.txt"}),
        bash(noise(7000) if big == 2 else "echo hi"),
        call("read_file", {"path": "f2.txt"}),
        call("edit_file", {"path": "edited.txt", "old_text": "old words\n", "new_text": new}),
    ]
    api = serve(scripted([*map(Reply, chain), Reply(bash("echo after-it")), "finished"]))
    s = session(api, tmp_path, threshold=threshold)
    assert ask(s, filled(s, threshold - 1300)) == "finished"
    assert [is_summary(request) for request in api.requests].index(True) == big + 1
    assert len(summaries(api)) == 1
    assert (tmp_path / "edited.txt").read_text() == new
    assert "after-it" in results(api.requests[-1].messages)[-1]["content"]
    assert_alive(s, api)


@pytest.mark.parametrize("big", range(3))
def test_parallel_results_stay_with_their_calls(serve, tmp_path, big):
    """Case 2-7: one of three parallel results crosses the threshold."""
    batch = [bash(noise(7000 if n == big else 10, f"MARK{n}")) for n in range(3)]
    api = serve(scripted([Reply(batch), "finished"]))
    s = session(api, tmp_path, threshold=10_000)
    assert ask(s, filled(s, 9500)) == "finished"
    assert len(summaries(api)) == 1
    assert len(results(summaries(api)[0].messages)) == 3
    newest = results(api.requests[-1].messages)
    assert [f"MARK{n}" in result["content"] for n, result in enumerate(newest)] == [True] * 3
    assert_alive(s, api)


def test_compactions_in_consecutive_turns_stay_valid(serve, tmp_path):
    """Case 2-7, twice in a row and more."""
    batches = [Reply([bash(noise(9000, f"MARK{n}-{m}")) for m in range(3)]) for n in range(5)]
    api = serve(scripted([*batches, "finished"]))
    s = session(api, tmp_path, threshold=6000, keep_recent=99)
    assert ask(s, "TASK-7: print a lot") == "finished"
    assert 2 <= len(summaries(api)) <= 6 and not back_to_back(api)
    assert "TASK-7: print a lot" in texts(api.requests[-1].messages)
    assert "MARK4-2" in results(api.requests[-1].messages)[-1]["content"]
    assert max(map(size, work(api))) < 1.2 * 6000


# 2-9


def test_small_readings_far_below_the_threshold_stay(serve, tmp_path):
    """Case 2-9: ten readings, then an edit with the exact text of the first."""
    for n in range(10):
        (tmp_path / f"f{n}.txt").write_text("".join(f"file {n}, line {m}, some words\n" for m in range(100)))
    exact = (tmp_path / "f0.txt").read_text()
    reads = [Reply(call("read_file", {"path": f"f{n}.txt"})) for n in range(10)]
    edit = Reply(call("edit_file", {"path": "f0.txt", "old_text": exact, "new_text": "short\n"}))
    api = serve([*reads, edit, "finished"])
    s = session(api, tmp_path)
    assert ask(s, "read all, then edit f0.txt") == "finished"
    assert (tmp_path / "f0.txt").read_text() == "short\n"
    found = results(api.requests[10].messages)
    for n in range(10):
        assert found[n]["content"].startswith(
            (tmp_path / f"f{n}.txt").read_text().rstrip() if n else exact.rstrip()
        )
    for one, two in pairwise(api.requests):
        assert two.messages[: len(one.messages)] == one.messages
    assert "micro_compact" not in said(s)


def cleared_script():
    turns = [call("read_file", {"path": f"f{n}.txt"}, id=f"toolu_read{n}") for n in range(8)]
    turns.insert(1, call("read_file", {"path": "absent.txt"}, id="toolu_error"))
    turns.insert(2, bash("echo tiny", id="toolu_tiny"))
    turns.insert(3, bash(noise(3000, "LOG") + "; exit 1", id="toolu_log"))
    return [Reply(turn) for turn in [*turns, bash("echo tiny too")]]


def test_a_cleared_result_says_what_it_was_and_where_it_is(serve, tmp_path):
    """Case 2-9, every turn clears: stubs never change; errors, small and new results stay."""
    for n in range(8):
        (tmp_path / f"f{n}.txt").write_text("".join(f"file {n}, line {m}, some words\n" for m in range(100)))
    api = serve([*cleared_script(), "finished"])
    s = session(api, tmp_path, clear_at_least=0)
    assert ask(s, "read all") == "finished"
    history = {}
    for request in api.requests:
        for result in results(request.messages):
            history.setdefault(result["tool_use_id"], []).append(result["content"])
    for seen in history.values():  # whole, whole, ..., stub, stub: it changes once at most
        assert sum(one != two for one, two in pairwise(seen)) <= 1
    last = {call_id: seen[-1] for call_id, seen in history.items()}
    cleared = sorted(call_id for call_id, seen in history.items() if seen[-1] != seen[0])
    assert cleared == ["toolu_log", "toolu_read0", "toolu_read1", "toolu_read2"]  # five newest readings stay
    for n in range(3):
        assert last[f"toolu_read{n}"].startswith(f"[Previous: used read_file: f{n}.txt")
    assert last["toolu_log"].startswith("[Previous: used bash: echo LOG; head -c 3000")
    for call_id in cleared:
        [address] = re.findall(r"\.transcripts/[\w./-]+?\.txt", last[call_id])
        assert (tmp_path / address).read_text().strip().startswith(history[call_id][0].strip()[:2000])
        assert f"{len(history[call_id][0]):,} characters" in last[call_id]
    assert last["toolu_error"] == history["toolu_error"][0] and last["toolu_tiny"] == history["toolu_tiny"][0]
    for n in range(3, 8):
        assert last[f"toolu_read{n}"].startswith((tmp_path / f"f{n}.txt").read_text().rstrip())


def test_the_lesson_s_layer_one_keeps_errors_small_and_new_results(tmp_path):
    """Case 2-9: the function by itself, with the lesson's defaults."""
    results = [("r0", "x" * 101, False), ("r1", "x" * 100, False), ("r2", "e" * 500, True)]
    results += [(f"n{n}", "y" * 300, False) for n in range(3)]
    messages = [{"role": "user", "content": "begin"}]
    for call_id, content, is_error in results:
        use = {"type": "tool_use", "id": call_id, "name": "bash", "input": {"command": f"echo {call_id}"}}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": content}
        messages.append({"role": "assistant", "content": [use]})
        messages.append({"role": "user", "content": [result | {"is_error": True} if is_error else result]})
    messages.append({"role": "assistant", "content": [{"type": "text", "text": "done"}]})
    before = json.dumps(messages)
    once = agent.micro_compact(messages)
    assert json.dumps(messages) == before  # pure
    contents = [message["content"][0]["content"] for message in once[2::2]]
    assert contents[0] == "[Previous: used bash: echo r0. 101 characters]"
    assert contents[1:] == [content for _, content, _ in results[1:]]
    assert agent.micro_compact(once) == once


# 2-13

OVERFLOWS = {
    "400": TOO_LONG,
    "413": Fault(413, "Request exceeds the maximum size"),
    "413 as a page": Fault(413, body="<html><title>413</title>too large</html>", content_type="text/html"),
    "older models": Fault(400, "input length and `max_tokens` exceed context limit: 9 + 8 > 10"),
    "llama.cpp": Fault(
        400,
        body=json.dumps(
            {
                "error": {
                    "code": 400,
                    "message": "the request exceeds the available context size, try increasing it",
                    "type": "exceed_context_size_error",
                    "n_prompt_tokens": 9,
                    "n_ctx": 8,
                }
            }
        ),
    ),
    "stop reason": Reply("cut FAULTWORDS", stop_reason="model_context_window_exceeded"),
}


@pytest.mark.parametrize("fault", OVERFLOWS.values(), ids=OVERFLOWS)
def test_too_long_is_answered_by_one_compaction_and_one_replay(serve, tmp_path, fault):
    """Case 2-13 (a)."""
    turns = [
        *(Reply(bash(noise(6000, f"MARK{n}"))) for n in range(4)),
        "first answer",
        fault,
        "second answer",
    ]
    api = serve(scripted(turns))
    s = session(api, tmp_path)
    assert ask(s, "PROMPT-A: print a lot") == "first answer"
    assert ask(s, "PROMPT-B: go on") == "second answer"
    assert len(work(api)) == 7  # five for A, one that failed, one replay
    assert 1 <= len(summaries(api)) <= 2
    assert said(s).count("[auto_compact: ") == 1
    replay = work(api)[6]
    assert texts(replay.messages).count("PROMPT-B: go on") == 1
    assert texts(replay.messages).count("PROMPT-A: print a lot") == 1
    assert first_text(replay).startswith(COMPRESSED) and "The summary." in first_text(replay)
    assert "cut FAULTWORDS" not in texts(replay.messages)
    assert_alive(s, api)


@pytest.mark.parametrize("fault", OVERFLOWS.values(), ids=OVERFLOWS)
def test_too_long_for_ever_is_one_clear_line(serve, tmp_path, fault):
    """Case 2-13 (b): the server takes summaries, but never the prompt."""
    turns = [*(Reply(bash(noise(6000))) for _ in range(4)), "first answer", *[fault] * 9]
    api = serve(scripted(turns))
    s = session(api, tmp_path)
    ask(s, "PROMPT-A: print a lot")
    with pytest.raises(agent.Stopped, match="context") as stopped:
        ask(s, "PROMPT-B: go on")
    assert "\n" not in str(stopped.value)
    assert len(work(api)) - 5 <= 3 and said(s).count("[auto_compact: ") <= 3
    assert len(summaries(api)) <= 3


@pytest.mark.parametrize("fault", OVERFLOWS.values(), ids=OVERFLOWS)
def test_too_long_for_everything_is_bounded_and_survived(serve, tmp_path, fault):
    """Case 2-13 (b): the server refuses summaries, too; once it takes requests again, all is well."""
    faults = [fault]
    api = serve(lambda request: faults[0] if faults else None)
    s = session(api, tmp_path)
    for prompt in ("PROMPT-A: hello", "PROMPT-B: hello again"):
        before = len(api.requests)
        with pytest.raises(agent.Stopped, match="context"):
            ask(s, prompt)
        assert len(api.requests) - before <= 6
    faults.clear()
    assert_alive(s, api)


def test_the_process_survives_a_prompt_that_is_too_long(serve, tmp_path):
    """Case 2-13 (b), as a process: the message on the screen, no trace, the prompt is back."""
    api = serve(scripted([TOO_LONG, TOO_LONG, TOO_LONG]))
    done = run(api, tmp_path, stdin="first\nsecond\nthird\nfourth\n")
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr
    assert "context" in done.stdout and "ok" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        "messages.0: no such thing",
        "max_tokens: 99 > 64, which is the maximum allowed",
        "tools.0.name: String should have at most 64 characters",
        "credit is too low",
    ],
)
def test_another_400_never_compacts(serve, tmp_path, words):
    """Case 2-13: a 400 with another reason."""
    turns = [*(Reply(bash(noise(6000))) for _ in range(4)), "first answer", Fault(400, words)]
    api = serve(scripted(turns))
    s = session(api, tmp_path)
    ask(s, "PROMPT-A: print a lot")
    with pytest.raises(agent.Stopped, match="400"):
        ask(s, "PROMPT-B: go on")
    assert summaries(api) == [] and len(work(api)) == 6
    assert_alive(s, api)


def test_the_smaller_window_is_remembered(serve, tmp_path):
    """Case 2-13: after the first surprise the agent compacts by itself, below what the server takes."""
    turns = [Reply(bash(noise(3000, f"MARK{n:02}"))) for n in range(30)]
    api = serve(scripted([*turns, "finished"]), window=8000)
    s = session(api, tmp_path, keep_recent=99)
    assert ask(s, "TASK-13: print a lot") == "finished"
    assert len([request for request in work(api) if request.status == 400]) == 1
    assert len([request for request in summaries(api) if request.status == 200]) >= 3
    assert "TASK-13: print a lot" in texts(api.requests[-1].messages)


# 2-14


@pytest.mark.parametrize("threshold", [100_000, 4000])
def test_a_result_larger_than_the_window_is_cut(serve, tmp_path, threshold):
    """Case 2-14: 6 MB in one line, read, printed, and three times at once."""
    (tmp_path / "big.txt").write_text("HEAD" + "x" * 6_000_000 + "TAIL")
    read, cat = call("read_file", {"path": "big.txt"}), bash("cat big.txt")
    api = serve(
        scripted([Reply(read), Reply(cat), Reply(bash("cat big.txt"), read, bash("cat big.txt")), "finished"])
    )
    s = session(api, tmp_path, threshold=threshold)
    assert ask(s, "look at it") == "finished"
    largest = max(len(json.dumps(request.body)) for request in api.requests)
    assert largest < (130_000 if threshold == 100_000 else 1.2 * 4 * threshold + 2000)
    assert len(summaries(api)) <= (0 if threshold == 100_000 else 2) and not back_to_back(api)
    first, second = results(work(api)[1].messages)[0], results(work(api)[2].messages)[-1]
    assert first["content"].startswith("HEAD") and not first.get("is_error")
    for result in first, second:
        assert result["content"].startswith("HEAD") and "TAIL" in result["content"]
        assert re.search(r"5,\d{3},\d{3} bytes left out", result["content"])
        [address] = re.findall(r"\.transcripts/[\w./-]+?\.txt", result["content"])  # how to see more of it
        assert (tmp_path / address).read_text().rstrip("\n") == (tmp_path / "big.txt").read_text().rstrip("\n")
    assert len(results(work(api)[3].messages)[-3:]) == 3
    assert_alive(s, api)


@pytest.mark.parametrize("letter", ["a", "\u00e4", "\u4e2d"])
def test_what_a_cut_reading_says_leads_to_the_rest(serve, tmp_path, letter):
    """Case 2-14: head and tail of a long line are shown, and the file that is named has the whole, whatever the letters."""
    line = "".join(f"{n:06}{letter}," for n in range(20_000))
    (tmp_path / "big.txt").write_text("first\n" + line + "\nlast\n")
    api = serve([Reply(call("read_file", {"path": "big.txt", "offset": 2}))])
    assert ask(session(api, tmp_path), "look at it") == "ok"
    head, note, tail, more = results(api.requests[1].messages)[0]["content"].split("\n")
    assert line.startswith(head) and line.endswith(tail) and min(len(head), len(tail)) > 2000
    assert more == "[lines 2 to 2 of 3; read on with offset=3]"
    [address] = re.findall(r"\.transcripts/[\w./-]+?\.txt", note)
    assert (tmp_path / address).read_text() == f"{line}\n{more}"


# 2-8


def prepared(serve, tmp_path, turns, summary="The summary."):
    api = serve(scripted([Reply(bash(noise(8000))), Reply(bash(noise(8000))), *turns], summary))
    return api, session(api, tmp_path)


def test_compact_alone(serve, tmp_path):
    """Case 2-8 (a)."""
    use = call("compact", {"focus": "the FOCUS-8 numbers"}, id="toolu_compact")
    api, s = prepared(serve, tmp_path, [Reply(use), "finished"])
    assert ask(s, "TASK-8") == "finished"
    assert [is_summary(request) for request in api.requests] == [False, False, False, True, False]
    assert "the FOCUS-8 numbers" in last_text(api.requests[3])
    assert results(api.requests[3].messages)[-1]["tool_use_id"] == "toolu_compact"
    after = api.requests[4]
    assert after.messages[0]["role"] == "user" and first_text(after).startswith(COMPRESSED)
    assert "| The summary." in first_text(after) and "TASK-8" in texts(after.messages)
    assert size(after) < size(api.requests[2])
    assert_alive(s, api)


def test_compact_in_the_middle_of_a_batch(serve, tmp_path):
    """Case 2-8 (b): the calls around it are run, once, and answered before the summary is asked for."""
    batch = [
        bash("echo x >> x", id="toolu_x"),
        call("compact", {}, id="toolu_c"),
        bash("echo y >> y", id="toolu_y"),
    ]
    api, s = prepared(serve, tmp_path, [Reply(batch), "finished"])
    assert ask(s, "TASK-8") == "finished"
    assert (tmp_path / "x").read_text() == "x\n" and (tmp_path / "y").read_text() == "y\n"
    assert [r["tool_use_id"] for r in results(summaries(api)[0].messages)[-3:]] == [
        "toolu_x",
        "toolu_c",
        "toolu_y",
    ]
    assert "The summary." in first_text(api.requests[-1])
    assert_alive(s, api)


def test_compact_twice_in_one_reply_is_one_summary(serve, tmp_path):
    """Case 2-8 (c)."""
    batch = [call("compact", {"focus": "one"}), call("compact", {"focus": "two"})]
    api, s = prepared(serve, tmp_path, [Reply(batch), "finished"])
    assert ask(s, "TASK-8") == "finished"
    assert len(summaries(api)) == 1 and len(api.requests) == 5
    assert "The summary." in first_text(api.requests[-1])
    assert_alive(s, api)


def test_compact_again_right_after_a_compaction_makes_no_summary(serve, tmp_path):
    """Case 2-8 (c), in two replies: there is nothing new to compact (DESIGN section 6)."""
    api, s = prepared(serve, tmp_path, [Reply(call("compact", {})), Reply(call("compact", {})), "finished"])
    assert ask(s, "TASK-8") == "finished"
    assert len(summaries(api)) == 1
    assert "nothing to compact" in results(api.requests[-1].messages)[-1]["content"].lower()


def test_compact_as_the_very_first_action(serve, tmp_path):
    """Case 2-8 (d)."""
    api = serve(scripted([Reply(call("compact", {})), "finished"]))
    s = session(api, tmp_path)
    assert ask(s, "TASK-8") == "finished"
    assert summaries(api) == []
    [result] = results(api.requests[1].messages)
    assert "nothing to compact" in result["content"].lower() and not result.get("is_error")
    assert_alive(s, api)


@pytest.mark.parametrize(
    "arguments", [{"focus": 5}, {"focus": ["a"]}, {"focus": None}, {"focus": ""}, {"focuss": "x"}]
)
def test_compact_with_odd_arguments(serve, tmp_path, arguments):
    """Case 2-8 (e): a wrong type is an error that names the argument; a missing one is none."""
    api, s = prepared(serve, tmp_path, [Reply(call("compact", arguments, id="toolu_c")), "finished"])
    assert ask(s, "TASK-8") == "finished"
    wrong = bool(arguments.get("focus"))
    assert len(summaries(api)) == (0 if wrong else 1)
    answered = api.requests[3].messages
    [result] = [r for r in results(answered) if r["tool_use_id"] == "toolu_c"]
    assert bool(result.get("is_error")) == wrong
    assert not wrong or "focus" in result["content"] and "string" in result["content"]
    assert_alive(s, api)


def test_a_summary_that_fails_after_the_compact_tool_changes_nothing(serve, tmp_path):
    """Case 2-8 with 2-4: the call is answered, the history stays, the work goes on."""
    api, s = prepared(serve, tmp_path, [Reply(call("compact", {}, id="toolu_c")), "finished"], Reply(""))
    assert ask(s, "TASK-8") == "finished"
    assert len(summaries(api)) == 1
    assert [r["tool_use_id"] for r in results(api.requests[-1].messages)][-1] == "toolu_c"
    assert len(results(api.requests[-1].messages)) == 3
    assert_alive(s, api)


# 2-12

CJK = "".join(chr(0x4E00 + n % 5000) for n in range(3_000))
DENSE = {
    "cjk": "\n".join(CJK[n : n + 60] for n in range(0, 3000, 60)),
    "base64": base64.b64encode(random.Random(1).randbytes(6000)).decode(),
    "code": "function f(a,b){return a&&b?f(b,a):{x:[1,2],y:!0}};" * 150,
}


def counted(request, ratio):
    """Tokens of a request as the stand-in counts them."""
    body = [request.body["system"], request.body["tools"], request.messages]
    return len(json.dumps(body, ensure_ascii=False).encode()) // 4 * ratio


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("usage", [True, "late"])
def test_what_the_server_counts_is_what_counts(serve, tmp_path, kind, usage):
    """Case 2-12: the server counts 1.5 times the estimate; what one reply reports decides on the next."""
    threshold = 12_000
    (tmp_path / "dense.txt").write_text(DENSE[kind])
    turns = [Reply(call("read_file", {"path": "dense.txt"})) for _ in range(16)]
    api = serve(scripted([*turns, "finished"]), ratio=1.5, usage=usage)
    s = session(api, tmp_path, threshold=threshold, keep_recent=99)
    assert ask(s, "TASK-12: read") == "finished"
    assert len(summaries(api)) >= 2 and not back_to_back(api)
    for request, following in pairwise(api.requests):
        if not is_summary(request):
            assert counted(request, 1.5) < 1.2 * threshold
            assert is_summary(following) or counted(request, 1.5) <= threshold
    assert_alive(s, api)


@pytest.mark.parametrize("kind", DENSE)
def test_without_usage_the_estimate_is_enough(serve, tmp_path, kind):
    """Case 2-12, a server that reports no usage."""
    threshold = 12_000
    (tmp_path / "dense.txt").write_text(DENSE[kind])
    turns = [Reply(call("read_file", {"path": "dense.txt"})) for _ in range(20)]
    api = serve(scripted([*turns, "finished"]), usage=False)
    s = session(api, tmp_path, threshold=threshold, keep_recent=99)
    assert ask(s, "TASK-12: read") == "finished"
    assert len(summaries(api)) >= 2 and not back_to_back(api)
    assert max(map(size, work(api))) < 1.2 * threshold
    assert_alive(s, api)


@pytest.mark.parametrize("usage", [True, False])
def test_a_large_chinese_file_stays_within_the_bound(serve, tmp_path, usage):
    """Case 2-12, 100,000 characters: a result is bounded in tokens, not characters (DESIGN 4, rule 6)."""
    threshold = 10_000
    (tmp_path / "cjk.txt").write_text("\n".join(DENSE["cjk"] for _ in range(34)))
    batch = [bash("cat cjk.txt"), call("read_file", {"path": "cjk.txt"}), bash("cat cjk.txt | tr -d '\\n'")]
    api = serve(scripted([Reply(batch), *map(Reply, batch), Reply(batch), "finished"]), usage=usage)
    s = session(api, tmp_path, threshold=threshold)
    assert ask(s, "TASK-12: read") == "finished"
    assert max(map(size, api.requests)) < 1.2 * threshold + 200  # a summary request has one text more
    assert_alive(s, api)


def test_chinese_text_is_not_counted_as_a_quarter_token_a_character():
    """Case 2-12: three UTF-8 bytes are three quarters of a token."""
    for words, tokens in ((CJK, 2250), ("word " * 600, 750)):
        message = [{"role": "user", "content": [text(words)]}]
        assert tokens <= agent.estimate_tokens(message) <= tokens + 30


def test_an_answered_request_is_not_open_again_after_a_second_compaction(serve, tmp_path):
    """A view that is one memory without a request ends with `user`, and yet nothing in it waits for an answer."""
    s = session(serve(), tmp_path)
    ask(s, "FIRST " + "word " * 2000)
    [view] = agent.rebuild(s, s.messages, "A summary.")[:1]
    s.messages = [view]
    again = texts(agent.rebuild(s, s.messages, "Another."))
    assert "FIRST" in again and agent.EARLIER.strip() in again and agent.REQUEST.strip() not in again
    s.add("user", "SECOND")
    opened = texts(agent.rebuild(s, s.messages, "Another."))
    assert opened.endswith(agent.REQUEST + "SECOND") and "FIRST" in opened.partition(agent.REQUEST)[0]
