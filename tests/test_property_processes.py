"""Random conversations with the agent as a process: a signal at a random moment, and then `-c`.

A few of them in the normal run, a hundred of each kind in the bench setting; see test_property.py.
"""

import os
import random
import re
import signal
import time
from contextlib import suppress

import pytest
from harness import processes, results, spawn, texts
from messages_api import Fault, Reply, call, is_summary
from test_cases_transcript import resume_in_process
from test_property import EXAMPLES, as_logged, logged, until

SEEDS = range(EXAMPLES // 20 if EXAMPLES > 200 else 2)


def bash(number, mark, chance):
    """A call that says when it begins, on disk, and when it has ended, by its result."""
    middle = chance.choice(["true", "sleep 0.1", "seq 1 2000", "seq 1 9 >&2; false", f"timeout 0.1 sleep {mark}"])
    return call("bash", {"command": f"echo {number} >> begun; {middle}; echo ended {number}"})


def script(chance, mark):
    """Steps of work with a few faults, then an end; and whether that comes by itself or only by a signal."""
    steps = []
    for step in range(chance.randint(2, 8)):
        calls = [bash(f"{step}.{i}", mark, chance) for i in range(chance.randint(1, 4))]
        calls += [call("compact", {})] if chance.random() < 0.1 else []
        steps.append(Reply(f"Step {step} of the work. " * chance.choice([1, 20]), *calls, pace=chance.choice([0, 0.005])))
        steps += [Fault(529), Reply("Half a reply", end="reset")] if chance.random() < 0.2 else []
    wait = call("bash", {"command": f"echo waiting; sleep {mark} & sleep {mark}"})
    last = [Reply("I wait.", wait), Reply("I wait.", end="stall"), Fault(429, headers={"retry-after": "50"}), Reply("The end.")]
    steps.append(chance.choice(last))
    return steps, steps[-1] is last[-1]


@pytest.fixture
def go_on(monkeypatch, capsys):
    """go_on(api, cwd, steps) is the request that `-c` sends. All that was sent before must be on disk by then."""

    def resumed(api, cwd, steps):
        disk = "".join(path.read_text("utf-8", "replace") for path in cwd.glob(".transcripts/*.jsonl"))
        assert [said for request in api.requests for _, said in logged(request) if as_logged(said) not in disk] == []
        before = len(api.requests)
        steps.clear()
        assert resume_in_process(api, cwd, monkeypatch, capsys)[:2] == (0, "Done.\n")
        return api.requests[before].messages

    return resumed


@pytest.fixture
def mark():
    """The length of sleeps that are of one test only, in seconds; what is left of them is ended."""
    length = f"76{os.getpid()}.{time.time_ns() % 10**9}"
    yield length
    for process in processes(length):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def play(serve, cwd, chance, steps, number):
    """One task in a process, and a signal at a random moment: the stand-in, the exit status, and all that was said."""
    api = serve(lambda request: "A summary." if is_summary(request) else steps.pop(0) if steps else "Done.")
    child = spawn(api, cwd, "-y", "-p", "The task.")
    try:
        assert until(lambda: api.requests, 30)
        time.sleep(chance.uniform(0, 1.2))
    finally:
        child.send_signal(number)
        out, err = child.communicate(timeout=20)
    return api, child.returncode, out + err


@pytest.mark.parametrize("seed", SEEDS)
def test_a_signal_at_any_moment_ends_it_cleanly(serve, tmp_path, mark, go_on, seed):
    chance = random.Random(seed)
    steps, ends = script(chance, mark)
    number, status = chance.choice([(signal.SIGINT, 130), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
    api, ended, said = play(serve, tmp_path, chance, steps, number)
    late = (0, -number) if ends else ()  # after the end: Python, on its way out, has no handlers any more
    assert ended in (status, *late), said
    assert "Traceback" not in said and "Exception" not in said
    assert until(lambda: not processes(mark)), "a process of the call is left"
    messages = go_on(api, tmp_path, steps)
    assert "The task." in texts(messages)
    assert not any("may or may not have run" in result["content"] for result in results(messages)) or number != signal.SIGINT


@pytest.mark.parametrize("seed", SEEDS)
def test_kill_9_at_any_moment_loses_nothing(serve, tmp_path, mark, go_on, seed):
    """A reply of which a call has begun was whole, and a call after which another one has begun has ended."""
    chance = random.Random(-seed - 1)
    steps, _ = script(chance, mark)
    api, _, _ = play(serve, tmp_path, chance, steps, signal.SIGKILL)
    begun = (tmp_path / "begun").read_text().split() if (tmp_path / "begun").exists() else []
    sent = list(api.requests)
    messages = go_on(api, tmp_path, steps)
    known = texts(messages)
    known += "".join((tmp_path / name).read_text() for name in re.findall(r"whole output in (\S+)\]", known))
    if not any(map(is_summary, sent)):
        lost = [said for request in sent for _, said in logged(request) if said.partition("\n[exit status")[0] not in known]
        assert lost == []
        assert [number for number in begun if f"Step {number.partition('.')[0]} of the work." not in known] == []
        assert [number for number in begun[:-1] if f"ended {number}\n" not in known] == []
    assert "The task." in known
