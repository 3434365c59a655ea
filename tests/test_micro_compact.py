"""Layer 1: old tool results become one line each, as a function and in the loop."""

import copy
import json
import re
from itertools import pairwise
from typing import Any

from harness import agent, make_agent, results, said, texts
from messages_api import Reply, call, is_summary, text

STUB = "[Previous: used "
LONG = 4_000  # characters: 1,000 tokens


def exchange(
    call_id: str, content: str, name: str = "bash", thinks: bool = True, **arguments: str
) -> list[dict[str, Any]]:
    """A call and its result, as two messages."""
    thought = [{"type": "thinking", "thinking": "", "signature": f"of {call_id}"}]
    arguments = arguments or {"command": f"make {call_id}"}
    use = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    return [
        {"role": "assistant", "content": [*(thought if thinks else []), use]},
        {"role": "user", "content": [result]},
    ]


def conversation(*exchanges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These exchanges between a prompt and an answer."""
    messages = [{"role": "user", "content": [text("go")]}]
    messages += [message for exchange in exchanges for message in exchange]
    return [*messages, {"role": "assistant", "content": [text("done")]}]


def reading(call_id: str, path: str, content: str = "x" * LONG) -> list[dict[str, Any]]:
    return exchange(call_id, content, "read_file", path=path)


def saved_as(call_id: str) -> str:
    return f"there/{call_id}.txt"


def cleared(messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The ids of the results that layer 1 replaces."""
    view = agent.micro_compact(messages, **{"saved_as": saved_as, **options})
    return [r["tool_use_id"] for r in results(view) if r["content"].startswith(STUB)]


# The function.


def test_all_but_the_newest_three_long_results_become_a_line_that_says_where_they_are():
    messages = conversation(*(exchange(f"c{n}", "y" * 900) for n in range(6)))
    before = copy.deepcopy(messages)
    view = agent.micro_compact(messages, saved_as)
    assert messages == before  # it changes nothing
    contents = [result["content"] for result in results(view)]
    for n in range(3):
        assert contents[n] == f"[Previous: used bash; whole output in there/c{n}.txt]"
    assert contents[3:] == ["y" * 900] * 3
    calls = agent.all_blocks(messages, "tool_use")
    assert agent.all_blocks(view, "tool_use") == calls  # they say what was run
    assert [message["role"] for message in view] == [message["role"] for message in messages]


def test_thinking_stays_before_the_first_change_and_goes_behind_it():
    sizes = (20, 900, 900, 20, 20, 20)  # the second is the first that is cleared
    messages = conversation(*(exchange(f"c{n}", "y" * size) for n, size in enumerate(sizes)))
    view = agent.micro_compact(messages, saved_as)
    thoughts = [block["signature"] for block in agent.all_blocks(view, "thinking")]
    assert thoughts == ["of c0", "of c1"]
    assert view[:4] == messages[:4]


def test_a_message_that_was_nothing_but_thinking_goes_with_it():
    messages = conversation(*(exchange(f"c{n}", "y" * 900) for n in range(4)))
    silent = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "d"}]}
    messages += [{"role": "user", "content": [text("and?")]}, silent]
    view = agent.micro_compact(messages, saved_as)
    assert len(view) == len(messages) - 1 and all(message["content"] for message in view)


def test_short_results_and_errors_stay():
    at_limit = exchange("at", "x" * agent.MIN_CHARS)
    above = exchange("above", "x" * (agent.MIN_CHARS + 1))
    failed = exchange("failed", "x" * LONG)
    failed[1]["content"][0]["is_error"] = True
    newer = [exchange(f"n{n}", "") for n in range(3)]
    assert cleared(conversation(at_limit, above, failed, *newer)) == ["above"]


def test_results_that_the_model_has_not_answered_stay_however_many_they_are():
    calls = [exchange(f"p{n}", "x" * LONG, thinks=False) for n in range(5)]
    batch = [
        {"role": "assistant", "content": [one["content"][0] for one, _ in calls]},
        {"role": "user", "content": [two["content"][0] for _, two in calls]},
    ]
    messages = conversation(exchange("old", "x" * LONG), batch)
    assert cleared(messages) == ["old", "p0", "p1"]
    waiting = messages[:-1]
    assert cleared(waiting) == ["old"]
    assert cleared(waiting, keep_recent=0) == ["old"]


def test_what_was_cleared_is_never_touched_again():
    messages = conversation(*(exchange(f"c{n}", "y" * LONG) for n in range(6)))
    once = agent.micro_compact(messages, saved_as)
    assert agent.micro_compact(once, saved_as) is once
    more = [*once, *exchange("c6", "y" * LONG), *exchange("c7", "y" * LONG), once[-1]]
    again = agent.micro_compact(more, saved_as)
    assert results(again)[:3] == results(once)[:3]


def test_nothing_is_cleared_unless_enough_is_freed_at_once():
    messages = conversation(*(exchange(f"c{n}", "y" * LONG) for n in range(6)))
    assert agent.micro_compact(messages, saved_as, clear_at_least=3_000) is messages
    assert cleared(messages, clear_at_least=2_900) == ["c0", "c1", "c2"]
    assert agent.micro_compact(messages[:3], saved_as) == messages[:3]


def test_without_a_file_that_holds_it_a_result_stays():
    messages = conversation(*(exchange(f"c{n}", "y" * LONG) for n in range(6)))
    assert agent.micro_compact(messages, saved_as=lambda call_id: None) is messages
    only = {"c1": "kept/c1.txt"}
    assert cleared(messages, saved_as=only.get) == ["c1"]


def test_what_a_result_says_does_not_decide_what_it_is():
    """A long result that looks like a placeholder is still a result."""
    posing = f"{STUB}bash; whole output in nowhere]" + "x" * LONG
    messages = conversation(exchange("c", posing), *(exchange(f"n{n}", "") for n in range(3)))
    [first, *_] = results(agent.micro_compact(messages, saved_as))
    assert first["content"] == "[Previous: used bash; whole output in there/c.txt]"


def test_the_newest_reading_of_each_of_the_last_files_stays():
    messages = conversation(
        reading("first", "a.py"),
        reading("b", "b.py"),
        reading("c", "c.py"),
        reading("again", "./a.py"),  # the same file
        exchange("new", "x" * LONG),
    )
    assert cleared(messages, keep_recent=1) == ["first", "b", "c", "again"]
    assert cleared(messages, keep_recent=1, keep_files=2) == ["first", "b"]
    assert cleared(messages, keep_recent=1, keep_files=9) == ["first"]


def test_a_reading_that_no_longer_holds_is_not_kept():
    edit = exchange("edit", "Edited.", "edit_file", path="a.py")
    failed = exchange("failed", "not found", "edit_file", path="b.py")
    failed[1]["content"][0]["is_error"] = True
    messages = conversation(reading("a", "a.py"), reading("b", "b.py"), edit, failed)
    assert cleared(messages, keep_recent=1, keep_files=9) == ["a"]
    pairs = agent.calls_with_results(messages)
    assert {path: use["id"] for path, use in agent.used_files(pairs).items()} == {
        "a.py": "edit",
        "b.py": "b",
    }
    messages = conversation(reading("a", "a.py"), edit, reading("again", "a.py"), failed)
    assert cleared(messages, keep_recent=1, keep_files=9) == ["a"]


def test_a_tool_that_is_not_there_any_more_is_cleared_by_its_name():
    old = exchange("w", "x" * LONG, "weather_map", place="here")
    messages = conversation(old, *(exchange(f"n{n}", "") for n in range(3)))
    [first, *_] = results(agent.micro_compact(messages, saved_as, keep_files=9))
    assert first["content"] == "[Previous: used weather_map; whole output in there/w.txt]"


def test_a_result_without_its_call_is_left_alone():
    messages = conversation(*(exchange(f"c{n}", "y" * LONG) for n in range(5)))
    assert cleared(messages[2:]) == ["c1"]  # the call of c0 is gone


def test_the_estimate_counts_bytes():
    assert agent.estimate_tokens("a" * 4_000) == 1_000
    assert agent.estimate_tokens("\u5b57" * 4_000) == 3_000
    message = [{"role": "user", "content": [text("\u5b57" * 3_000)]}]
    assert 2_250 <= agent.estimate_tokens(message) <= 2_280


# In the loop.


def bash(command: str, **more: Any) -> dict[str, Any]:
    return call("bash", {"command": command}, **more)


def history(api: Any) -> dict[str, list[str]]:
    """What each result looked like in each of the requests, by its call."""
    seen: dict[str, list[str]] = {}
    for request in api.requests:
        for result in results(request.messages):
            seen.setdefault(result["tool_use_id"], []).append(result["content"])
    return seen


def test_far_below_the_threshold_nothing_is_changed(serve, tmp_path):
    """Each request begins with the one before it, thinking included; an old reading is of use."""
    for n in range(10):
        lines = [f"file {n}, line {m}, and some words\n" for m in range(100)]
        (tmp_path / f"f{n}.txt").write_text("".join(lines))
    exact = (tmp_path / "f0.txt").read_text()
    reads = [Reply(call("read_file", {"path": f"f{n}.txt"})) for n in range(10)]
    edit = call("edit_file", {"path": "f0.txt", "old_text": exact, "new_text": "short\n"})
    api = serve([*reads, Reply(edit), "finished"])
    a = make_agent(api, tmp_path)
    assert a.run("read all, then change f0.txt") == "finished"
    assert (tmp_path / "f0.txt").read_text() == "short\n"
    for one, two in pairwise(api.requests):
        assert two.messages[: len(one.messages)] == one.messages
    assert len(agent.all_blocks(api.requests[-1].messages, "thinking")) == 11
    assert "[micro_compact" not in said(a) and a.forgot == 0


def test_a_cleared_result_never_changes_again_and_its_file_holds_all_of_it(serve, tmp_path):
    """With every turn clearing; errors, short results and the last eight files stay."""
    for n in range(10):
        (tmp_path / f"f{n}.txt").write_text(f"line of file {n}\n" * 60)
    turns = [call("read_file", {"path": f"f{n}.txt"}, id=f"read{n}") for n in range(10)]
    turns[1:1] = [
        call("read_file", {"path": "absent.txt"}, id="error"),
        bash("echo tiny", id="tiny"),
        bash("seq 1 9000; exit 3", id="log"),
    ]
    last = [bash("echo 1"), bash("echo 2"), bash("echo 3")]
    api = serve([*(Reply(turn) for turn in [*turns, *last]), "finished"])
    a = make_agent(api, tmp_path, clear_at_least=0)
    assert a.run("read all") == "finished"
    seen = history(api)
    for versions in seen.values():  # whole, ..., whole, stub, ..., stub
        assert sum(one != two for one, two in pairwise(versions)) <= 1
    stubs = {name: v[-1] for name, v in seen.items() if v[-1].startswith(STUB)}
    assert sorted(stubs) == ["log", "read0", "read1"]
    for name, stub in stubs.items():
        whole = (tmp_path / re.search(r"whole output in (\S+)\]", stub)[1]).read_text()
        assert whole.startswith(seen[name][0][:900])
    assert "\n4500\n" in (tmp_path / a.transcript.folder / "log.txt").read_text()
    assert "\n4500\n" not in seen["log"][0]  # so long that the model saw a part
    shown = re.findall(r"\[micro_compact: ([\d,]+) -> ([\d,]+) tokens; .* in (\S+)/\]", said(a))
    freed = [int(one.replace(",", "")) - int(two.replace(",", "")) for one, two, _ in shown]
    assert min(freed) > 0 and sum(freed) == a.forgot
    assert {folder for _, _, folder in shown} == {a.transcript.folder}


def numbers(n: int) -> str:
    """A command with about 240 tokens of output."""
    return f"seq {n}000 {n}199"


def test_layer_one_waits_until_much_can_go_but_not_when_the_cache_is_cold(serve, tmp_path):
    api = serve([*(Reply(bash(numbers(n))) for n in range(1, 8)), "first", "second", "third"])
    a = make_agent(api, tmp_path, clear_at_least=600)
    assert a.run("count") == "first"
    assert [len(stubs_of(api, n)) for n in range(8)] == [0] * 6 + [3, 3]  # three are 600 tokens
    assert a.run("and?") == "second"
    assert len(stubs_of(api, -1)) == 3  # a fourth alone is not worth it
    a.model.last_reply = float("-inf")
    assert a.run("and now?") == "third"
    assert len(stubs_of(api, -1)) == 4 and said(a).count("[micro_compact") == 2


def stubs_of(api: Any, index: int) -> list[str]:
    contents = [result["content"] for result in results(api.requests[index].messages)]
    return [content for content in contents if content.startswith(STUB)]


def test_without_a_record_nothing_is_cleared(serve, tmp_path):
    """A link stands where the record should be; it is not followed."""
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    work.mkdir()
    elsewhere.mkdir()
    (work / ".transcripts").symlink_to(elsewhere)
    api = serve([*(Reply(bash(numbers(n))) for n in range(1, 7)), "done"])
    a = make_agent(api, work, clear_at_least=0, keep_recent=1)
    assert a.run("count") == "done"
    assert stubs_of(api, -1) == [] and len(results(api.requests[-1].messages)) == 6
    assert said(a).count("cannot write") == 1 and "micro_compact" not in said(a)
    assert list(elsewhere.iterdir()) == []


def test_after_going_on_a_placeholder_names_the_file_of_the_earlier_conversation(serve, tmp_path):
    api = serve([Reply(bash("seq 1 20000", id="big")), *(["ok"] * 4), "done"])
    first = make_agent(api, tmp_path)
    first.run("count")
    second = make_agent(api, tmp_path)
    agent.resume(second)
    second.run("one more")
    third = make_agent(api, tmp_path, clear_at_least=0, keep_recent=0)
    agent.resume(third)
    third.run("and another")
    [stub] = stubs_of(api, -1)
    address = stub.split()[-1].rstrip("]")
    assert address.startswith(first.transcript.folder)
    whole = (tmp_path / address).read_text().split("\n")
    assert whole[:20_000] == [str(n) for n in range(1, 20_001)]


def test_a_call_id_that_comes_again_after_going_on_gets_a_file_of_its_own(serve, tmp_path):
    """Some servers number their calls from one in each conversation."""
    turns = [Reply(bash(f"seq {n}000 {n}199", id="call_1")) for n in (1, 2)]
    api = serve([turns[0], "ok", turns[1], "ok", "ok"])
    make_agent(api, tmp_path).run("count")
    a = make_agent(api, tmp_path, clear_at_least=0, keep_recent=0)
    agent.resume(a)
    a.run("count on")
    a.run("and?")
    addresses = [stub.split()[-1].rstrip("]") for stub in stubs_of(api, -1)]
    contents = [(tmp_path / address).read_text().split()[0] for address in addresses]
    assert contents == ["1000", "2000"]


def long_conversation(steps: int) -> Any:
    """A script of many calls, each with an output of its own; one asks for compaction, too."""
    done = 0

    def script(request: Any) -> Any:
        nonlocal done
        if is_summary(request):
            return f"Summary after {done} calls. Nothing of note."
        done += 1
        if done > steps:
            return "All are done."
        words = f"Step {done}. " + "I look at the next part of the numbers. " * 15
        calls = [bash(f"echo OUTPUT-{done}; {numbers(done)}")]
        if done == 8:
            calls.append(call("compact", {"focus": "the colour of step 33"}))
        return Reply(words, *calls)

    return script


def test_forty_calls_with_both_layers_send_no_invalid_request(serve, tmp_path):
    """The model thinks in every reply, and layer 1 acts in every turn."""
    api = serve(long_conversation(40))
    a = make_agent(api, tmp_path, threshold=3_500, clear_at_least=0, keep_recent=1)
    assert a.run("Look at all 40 parts. RULE: never touch KEEP.me.") == "All are done."
    assert said(a).count("[auto_compact: ") >= 4 and "[micro_compact: " in said(a)
    assert api.thinking_checked > 0
    seen: dict[str, str] = {}
    for name, versions in history(api).items():
        stubs = {version for version in versions if version.startswith(STUB)}
        assert len(stubs) <= 1  # the same bytes ever after
        for stub in stubs:
            seen[name] = (tmp_path / stub.split()[-1].rstrip("]")).read_text()
    assert len(seen) >= 25 and all(whole.startswith("OUTPUT-") for whole in seen.values())
    orders = [texts(request.messages[-1:]) for request in api.requests]
    assert sum("the colour of step 33" in order for order in orders) == 1
    assert "RULE: never touch KEEP.me." in texts(api.requests[-1].messages)
    assert max(len(json.dumps(r.messages)) // 4 for r in api.requests) < 1.2 * 3_500


# What was settled once stays in the cache.


def test_what_stands_up_to_the_last_cleared_result_is_left_as_it_is():
    """A result that was kept then, as a short list of readings, is not cleared later."""
    messages = conversation(
        reading("r0", "a.py"), *(exchange(f"c{n}", "y" * LONG) for n in range(6))
    )
    assert cleared(messages, keep_files=0) == ["r0", "c0", "c1", "c2"]
    assert cleared(messages, keep_files=0, after="c0") == ["c1", "c2"]
    assert cleared(messages, keep_files=0, after="unknown") == ["r0", "c0", "c1", "c2"]


def test_the_server_is_asked_to_keep_what_stands_up_to_the_last_two_changes(serve, tmp_path):
    turns = [call("bash", {"command": f"seq {n}000 {n}400"}, id=f"c{n}") for n in range(1, 10)]
    api = serve([*(Reply(turn) for turn in turns), "done"])
    a = make_agent(api, tmp_path, threshold=100_000, clear_at_least=900, keep_recent=1)
    a.model.last_reply = agent.time.monotonic()  # the cache is warm
    assert a.run("count") == "done"
    places = []
    for request in api.requests:
        marked = [r["tool_use_id"] for r in results(request.messages) if "cache_control" in r]
        stubs = [
            r["tool_use_id"] for r in results(request.messages) if r["content"][:9] == STUB[:9]
        ]
        assert len(marked) <= 2 and set(marked) <= set(stubs)
        assert request.body["cache_control"] == {"type": "ephemeral"}
        places.append(marked)
    assert places[0] == [] and places[-1][-1] == stubs[-1]
    assert [len(marked) for marked in places] == sorted(len(marked) for marked in places)


def test_with_a_cold_cache_all_that_is_old_is_cleared_again(serve, tmp_path):
    turns = [call("bash", {"command": f"seq {n}000 {n}400"}, id=f"c{n}") for n in range(1, 8)]
    api = serve([*(Reply(turn) for turn in turns), "done", "again"])
    a = make_agent(api, tmp_path, clear_at_least=900, keep_recent=1)
    a.model.last_reply = agent.time.monotonic()
    a.run("count")
    assert len(a.model.places) > 1
    a.model.last_reply = float("-inf")
    a.run("and now?")
    assert not any("cache_control" in r for r in results(api.requests[-1].messages))
