"""Random conversations with the agent as a process: a signal at a random moment, and then `-c`.

A few of them in the normal run, many with AGENT_EXAMPLES; see test_property.py.
"""

import os
import random
import re
import signal
import time
from contextlib import suppress

import pytest
from harness import agent, make_agent, processes, results, spawn, texts
from messages_api import Fault, Reply, call, is_summary
from test_property import EXAMPLES, as_logged, logged, transcripts_of, until

SEEDS = range(max(EXAMPLES // 40, 1))


def bash(number, mark, chance):
    """A call that says when it begins, on disk, and when it has ended, by its result."""
    ways = ["true", "sleep 0.1", "seq 1 2000", "seq 1 9 >&2; false", f"timeout 0.1 sleep {mark}"]
    middle = chance.choice(ways)
    return call("bash", {"command": f"echo {number} >> begun; {middle}; echo ended {number}"})


def script(chance, mark):
    """Steps of work with a few faults, then an end; and whether that comes by itself."""
    steps = []
    for step in range(chance.randint(2, 8)):
        calls = [bash(f"{step}.{i}", mark, chance) for i in range(chance.randint(1, 4))]
        if chance.random() < 0.1:
            calls.append(call("compact", {}))
        said = f"Step {step} of the work. " * chance.choice([1, 20])
        steps.append(Reply(said, *calls, pace=chance.choice([0, 0.005])))
        if chance.random() < 0.2:
            steps += [Fault(529), Reply("Half a reply", end="reset")]
    wait = call("bash", {"command": f"echo waiting; sleep {mark} & sleep {mark}"})
    last = [
        Reply("I wait.", wait),
        Reply("I wait.", end="stall"),
        Fault(429, headers={"retry-after": "50"}),
        Reply("The end."),
    ]
    steps.append(chance.choice(last))
    return steps, steps[-1] is last[-1]


@pytest.fixture
def mark():
    """The length of sleeps that are of one test only, in seconds; what is left of them is ended."""
    length = f"76{os.getpid()}.{time.time_ns() % 10**9}"
    yield length
    for process in processes(length):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def play(serve, cwd, chance, steps, number):
    """One task in a process, and a signal at a random moment: stand-in, exit status, streams."""

    def answer(request):
        if is_summary(request):
            return "A summary."
        return steps.pop(0) if steps else "Done."

    api = serve(answer)
    child = spawn(api, cwd, "-y", "-p", "The task.")
    try:
        assert until(lambda: api.requests or child.poll() is not None, 60)
        time.sleep(chance.uniform(0, 1.2))
    finally:
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    return api, child.returncode, out + err


def go_on(api, cwd, steps):
    """The request after a new start with the conversation. All that was sent must be on disk."""
    disk = transcripts_of(cwd)
    sent = [said for request in api.requests for _, said in logged(request)]
    assert [said for said in sent if as_logged(said) not in disk] == []
    before = len(api.requests)
    steps.clear()
    a = make_agent(api, cwd)
    [path] = cwd.glob(".transcripts/*.jsonl")
    agent.resume(a, path.stem)
    assert a.run("Go on.") == "Done."
    return api.requests[before].messages


@pytest.mark.parametrize("seed", SEEDS)
def test_a_signal_at_any_moment_ends_it_cleanly(serve, tmp_path, mark, seed):
    chance = random.Random(seed)
    steps, ends = script(chance, mark)
    number = chance.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM])
    api, ended, said = play(serve, tmp_path, chance, steps, number)
    # After the end Python, on its way out, has no handlers any more.
    late = (0, -number) if ends else ()
    assert ended in (128 + number, *late), said
    assert "Traceback" not in said and "Exception" not in said
    assert until(lambda: not processes(mark)), "a process of the call is left"
    messages = go_on(api, tmp_path, steps)
    assert "The task." in texts(messages)
    unknown = [r for r in results(messages) if "may or may not have run" in r["content"]]
    assert unknown == [] or number != signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_kill_9_at_any_moment_loses_nothing(serve, tmp_path, mark, seed):
    """A reply of which a call has begun was whole; a call behind which one has begun has ended."""
    chance = random.Random(-seed - 1)
    steps, _ = script(chance, mark)
    api, _, _ = play(serve, tmp_path, chance, steps, signal.SIGKILL)
    begun = (tmp_path / "begun").read_text().split() if (tmp_path / "begun").exists() else []
    sent = list(api.requests)
    known = texts(go_on(api, tmp_path, steps))
    names = re.findall(r"whole output in (\S+)\]", known)
    known += "".join((tmp_path / name).read_text() for name in names)
    assert "The task." in known
    if any(map(is_summary, sent)):
        return
    for request in sent:
        for _, said in logged(request):
            assert said.partition("\n[exit status")[0] in known
    for number in begun:
        assert f"Step {number.partition('.')[0]} of the work." in known
    for number in begun[:-1]:
        assert f"ended {number}\n" in known
