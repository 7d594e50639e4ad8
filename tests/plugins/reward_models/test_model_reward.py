"""Rewards by a served model: batches, failures, and answers that do not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from listening import free_port
from serving import serving

from spurline.errors import RunFailedError
from spurline_reward_models import reward as reward_module
from spurline_reward_models.configs import ModelRewardConfig
from spurline_reward_models.reward import ModelReward
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer
from spurline_rl.scoring import terms_of_all


class Server(ThreadingHTTPServer):
    """Scores a text by its length, once for each label. Fails as often as `failures` says, with `status`, and cuts off
    `cut` answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[Any] = []
        self.failures, self.status, self.missing, self.cut, self.labels = 0, 503, 0, 0, 1


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, content))
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(self.server.status)
            return
        data = [
            {"index": number, "data": [float(len(text))] * self.server.labels}
            for number, text in enumerate(content["input"])
        ]
        body = json.dumps({"data": data[: len(data) - self.server.missing][::-1]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.server.cut -= (is_cut := self.server.cut > 0)
        self.wfile.write(body[: len(body) // 2] if is_cut else body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as made:
        yield made


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(reward_module, "_LONGEST_PAUSE_S", 0.01)


def reward_of(server: Server, **settings: Any) -> ModelReward:
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    return ModelReward(ModelRewardConfig(url=url, model="judge", suffix="!", **settings))


def answers(*responses: str) -> list[Answer]:
    return [Answer("2+2=", response, None, {}) for response in responses]


def test_answers_that_end_together_are_scored_in_one_request_in_their_order(server: Server) -> None:
    found = asyncio.run(terms_of_all({"judge": reward_of(server)}, answers("4", "four", "")))
    assert found == [{"judge": 6.0}, {"judge": 9.0}, {"judge": 5.0}]
    [(path, content)] = server.requests
    assert path == "/pooling"
    assert content["add_special_tokens"] is False
    assert content["input"] == ["2+2=4!", "2+2=four!", "2+2=!"]
    assert reward_of(server, batch_size=2).score_many(answers("a", "b", "c")) == [6.0] * 3
    assert [len(request["input"]) for _, request in server.requests[1:]] == [2, 1]


def test_a_failed_request_is_repeated_until_time_is_up_and_a_wrong_answer_scores_nothing(server: Server) -> None:
    patient, hasty = reward_of(server), reward_of(server, give_up_after_s=0.05)
    assert patient.score_many(answers("4")) == hasty.score_many(answers("4")) == [6.0]
    server.failures = 30
    assert patient.score_many(answers("4")) == [6.0]
    server.cut = 1
    assert patient.score_many(answers("4")) == [6.0]
    server.failures = 10**6
    with pytest.raises(AttemptFailedError, match=r"gave no scores for 0\.05 s.*503"):
        hasty.score_many(answers("4"))
    server.failures, server.missing = 0, 1
    with pytest.raises(AttemptFailedError, match="1 answers for 2 texts"):
        asyncio.run(terms_of_all({"judge": hasty}, answers("4", "5")))
    server.failures, server.status = 1, 404
    with pytest.raises(RunFailedError, match=r"gives no score.*404"):
        patient.score_many(answers("4"))


def test_a_server_that_gives_no_scores_or_several_for_a_text_is_an_error_at_once(server: Server) -> None:
    server.labels = 2
    with pytest.raises(RunFailedError, match=r"/pooling.*instead of one finite number"):
        reward_of(server).score_many(answers("4"))
    away = ModelReward(ModelRewardConfig(url=f"http://127.0.0.1:{free_port()}", model="judge"))
    with pytest.raises(RunFailedError, match=r"127\.0\.0\.1.*gives no score.*refused.*--runner pooling"):
        asyncio.run(terms_of_all({"judge": away}, answers("4")))
