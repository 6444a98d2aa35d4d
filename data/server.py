"""An engine that is a server: whatever speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, OpenAI itself).

Answers are asked for as chats, under the server's own template; user's turns, which no chat endpoint writes, as
completions of token ids. Knows HTTP and the protocol, and no model.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import httpx

from paceline.data.conversations import BadData
from paceline.data.synthesis import Ask, Written

AGAIN = (408, 409, 425, 429)  # and all from 500 on: tried again
UNFIT = (400, 413, 422)  # this one prompt is at fault, the run goes on


class Server:
    """Writes what it is asked through `url` (ends in /v1), many requests at a time.

    stop: texts that end a turn beside the server's own. key: sent as a bearer token. timeout: seconds without a byte
    after which a request is given up. retries: further tries of a request, each after twice the wait of the one before
    (`backoff` seconds at first, or what the server asks for). per_second: requests begun at most, None without limit.
    """

    def __init__(
        self,
        url: str,
        model: str,
        stop: Sequence[str] = (),
        key: str | None = None,
        concurrency: int = 32,
        timeout: float = 120.0,
        retries: int = 8,
        backoff: float = 1.0,
        per_second: float | None = None,
    ):
        self._url, self._model, self._stop = url.rstrip("/"), model, list(stop)
        self._concurrency, self._retries, self._backoff = concurrency, retries, backoff
        self._gap, self._begin, self._lock = 1 / per_second if per_second else 0.0, 0.0, threading.Lock()
        self._over = threading.Event()
        self.tokens = self.retried = 0
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout,
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    def write(self, more: Callable[[], Ask | None]) -> Iterator[tuple[Ask, Written]]:
        """An `Engine`. Raises BadData where the server refuses the run, or stays silent after all retries."""
        waiting: dict[Future[Written], Ask] = {}
        pool = ThreadPoolExecutor(self._concurrency)
        try:
            while True:
                while len(waiting) < self._concurrency and (ask := more()) is not None:
                    waiting[pool.submit(self._written, ask)] = ask
                if not waiting:
                    return
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), future.result()
        finally:  # also where the caller stops: nobody waits for what is still under way
            self._over.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _written(self, ask: Ask) -> Written:
        sampling = ask.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": ask.key % 2**31,
        }
        if ask.begin is None:
            path, body = "chat/completions", body | {"messages": ask.messages}
        else:
            path, body = "completions", body | {"prompt": ask.ids, "stop": self._stop}
        answer = self._post(path, body)
        if isinstance(answer, str):
            return Written("", False, answer)
        choice = answer["choices"][0]
        text = choice["message"]["content"] if ask.begin is None else choice["text"]
        with self._lock:
            self.tokens += (answer.get("usage") or {}).get("completion_tokens") or 0
        return Written(text or "", choice["finish_reason"] == "stop")

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | str:
        """The server's answer, in which a choice stands; or why it will not answer this request."""
        fault = ""
        for tried in range(self._retries + 1):
            if tried:
                self.retried += 1
            self._pace()
            asked_for = 0.0
            try:
                response = self._client.post(f"{self._url}/{path}", json=body)
                status = response.status_code
                fault = f"{status} {response.reason_phrase}"
                if status == 200:
                    if _whole(answer := response.json(), path):
                        return answer
                    fault = "an answer that is none"
                elif status in UNFIT:
                    return f"refused by the server ({status})"
                elif status not in AGAIN and status < 500:
                    raise BadData(f"server.url={self._url}: {path}: {fault}: {' '.join(response.text.split())[:200]}")
                asked_for = _seconds(response.headers.get("Retry-After"))
            except httpx.TransportError as error:  # no connection, none any more, or nothing came for too long
                fault = type(error).__name__
            except ValueError as error:
                if isinstance(error, BadData):
                    raise
                fault = "an answer that is no JSON"
            pause = max(asked_for, self._backoff * 2**tried * random.uniform(0.5, 1.0))
            if self._over.wait(min(pause, 60.0)):
                break
        raise BadData(
            f"server.url={self._url}: no answer in {self._retries + 1} tries, the last: {fault}; "
            "once it serves again, the same command goes on"
        )

    def _pace(self) -> None:
        """Wait until the next request may begin."""
        with self._lock:
            self._begin = max(self._begin + self._gap, time.monotonic())
            pause = self._begin - time.monotonic()
        if pause > 0:
            self._over.wait(pause)


def _whole(answer: Any, path: str) -> bool:
    """Whether an answer has what is read of it."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if path.startswith("chat") else choice["text"]
        return isinstance(choice["finish_reason"], str) and (text is None or isinstance(text, str))
    except (KeyError, IndexError, TypeError):
        return False


def _seconds(header: str | None) -> float:
    """What Retry-After asks for, where it is a number."""
    return float(header) if header and header.strip().isdigit() else 0.0
