"""A server as engine: real HTTP to one that fails, stalls, cuts connections and repeats, and a run that is killed."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.conf.entry import load
from paceline.data.conversations import BadData
from paceline.data.server import Server
from paceline.data.synthesis import Ask, Sampling
from paceline.scripts.synthesize import run

FAULTS = ("503", "stall", "cut", "429", "garbage", "nothing", "half")


class Fake(ThreadingHTTPServer):
    """Answers every chat with a text made of its last message, after as many faults in turn as `fault` says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.begun: list[float] = []
        self.fault = lambda text, times: ""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: Any) -> None:
        """Clients that leave are no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"] if "messages" in body else str(body["prompt"])
        with self.server.lock:
            self.server.begun.append(time.monotonic())
            times = self.server.asked[text]
            self.server.asked[text] += 1
            self.server.bodies.append(body)
            self.server.keys.add(self.headers.get("Authorization"))
        fault = self.server.fault(text, times)
        if fault == "stall":
            time.sleep(1.0)
        if fault == "cut":
            self.connection.close()
            return
        said = f"You said: {text}"
        choice = {"message": {"content": said}} if "messages" in body else {"text": said}
        whole = json.dumps({"choices": [choice | {"finish_reason": "stop"}], "usage": {"completion_tokens": 3}})
        sent = {"garbage": "<html>", "nothing": '{"choices": []}'}.get(fault, whole).encode()
        self.send_response(int(fault) if fault.isdigit() else 200)
        if fault == "429":
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent[: len(sent) // 2] if fault == "half" else sent)
        if fault == "half":
            self.connection.close()

    def log_message(self, *_: Any) -> None:
        """Not to the test's output."""


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


def asks(count: int, begin: str | None = None) -> list[Ask]:
    def ask(i: int) -> Ask:
        messages = [{"role": "user", "content": f"question {i}"}]
        return Ask(str(i), messages, begin, [i, 7], Sampling(0.5, 0.9, 30), i)

    return [ask(i) for i in range(count)]


def client(fake: Fake, **options: Any) -> Server:
    return Server(fake.url, "toy", **{"backoff": 0.01, "timeout": 0.5, "concurrency": 4} | options)


def answers(server: Server, wanted: list[Ask]) -> dict[str, str]:
    left = iter(wanted)
    found = list(server.write(lambda: next(left, None)))
    assert len(found) == len({ask.chat for ask, _ in found})
    return {ask.chat: written.fault or written.text for ask, written in found}


def test_every_fault_is_tried_again_and_every_prompt_answered_once(fake: Fake) -> None:
    """Each prompt meets two faults, every kind its turn, before it is answered."""
    fake.fault = lambda text, times: FAULTS[(int(text.split()[1]) + times) % len(FAULTS)] if times < 2 else ""
    server = client(fake)
    assert answers(server, asks(14)) == {str(i): f"You said: question {i}" for i in range(14)}
    assert set(fake.asked.values()) == {3}
    assert (server.retried, server.tokens) == (28, 14 * 3)


def test_what_is_asked_for_arrives_as_the_protocol_wants_it(fake: Fake) -> None:
    server = client(fake, key="secret", stop=["<|im_end|>"])
    assert answers(server, asks(1)) == {"0": "You said: question 0"}
    server = client(fake, key="secret", stop=["<|im_end|>"])
    assert answers(server, asks(1, begin="Tell")) == {"0": "You said: [0, 7]"}
    chat, completion = sorted(fake.bodies, key=lambda body: "prompt" in body)
    common = {"model": "toy", "temperature": 0.5, "top_p": 0.9, "max_tokens": 30, "seed": 0}
    assert chat == common | {"messages": [{"role": "user", "content": "question 0"}]}
    assert completion == common | {"prompt": [0, 7], "stop": ["<|im_end|>"]}
    assert fake.keys == {"Bearer secret"}


def test_one_unfit_prompt_is_dropped_and_a_refused_key_ends_the_run(fake: Fake) -> None:
    fake.fault = lambda text, times: "400" if text == "question 1" else ""
    assert answers(client(fake), asks(3))["1"] == "refused by the server (400)"
    fake.fault = lambda text, times: "401"
    with pytest.raises(BadData, match=r"server.url=.*chat/completions: 401 Unauthorized"):
        answers(client(fake), asks(3))


def test_a_server_that_stays_down_ends_the_run_in_one_line(fake: Fake) -> None:
    fake.fault = lambda text, times: "503"
    with pytest.raises(BadData, match="no answer in 3 tries, the last: 503 Service Unavailable; once it serves again"):
        answers(client(fake, retries=2), asks(1))
    assert fake.asked["question 0"] == 3


def test_no_more_requests_are_begun_a_second_than_asked(fake: Fake) -> None:
    answers(client(fake, per_second=20.0), asks(9))
    gaps = [later - first for first, later in zip(fake.begun, fake.begun[4:], strict=False)]
    assert min(gaps) > 0.15, "four gaps of 50 ms, less what a request may be late"


def test_killed_and_run_again_every_prompt_is_answered_exactly_once(fake: Fake, tmp_path: Path) -> None:
    """SIGKILL in the midst of it, against a server with all its faults; then the same command again."""
    fake.fault = lambda text, times: FAULTS[(len(text) + times) % len(FAULTS)] if (times + len(text)) % 3 == 0 else ""
    wanted = [f"What is number {i} {'x' * (i % 5)}?" for i in range(60)]
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in wanted))
    cfg = load(
        "synthesize",
        "target=tiny",
        "count=null",
        "given.source=jsonl",
        f"given.path={file}",
        f"out={out}",
        "shard=25",
        "filter.near=null",
        "engine=server",
        f"server.url={fake.url}",
        "server.model=toy",
        "server.concurrency=3",
        "server.timeout=0.5",
        "server.backoff=0.01",
        "server.per_second=60",
    )

    def lines() -> list[str]:
        return [line for file in sorted(out.glob("*.jsonl")) for line in file.read_text().split("\n") if line]

    first = multiprocessing.get_context("fork").Process(target=run, args=(cfg,))
    first.start()
    until = time.monotonic() + 120
    while len(lines()) < 20 and time.monotonic() < until:
        time.sleep(0.02)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    before = len(lines())
    assert 20 <= before < len(wanted)
    with sorted(out.glob("*.jsonl"))[-1].open("a") as torn:
        torn.write('{"id": "5", "messages": [{"role"')

    run(cfg)
    records = [json.loads(line) for line in lines()]
    assert sorted(record["messages"][0]["content"] for record in records) == sorted(wanted)
    assert all(r["messages"][1]["content"] == f"You said: {r['messages'][0]['content']}" for r in records)
    assert sorted(file.name for file in out.glob("*.jsonl")) == [f"conversations-0000{i}.jsonl" for i in range(3)]
    assert sum(fake.asked.values()) > len(wanted), "some were asked again"
