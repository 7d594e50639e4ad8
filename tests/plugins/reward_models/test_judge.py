"""The reward `judge` against a server of its own: marks, the cache, failures, and what a rubric may say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from serving import serving

from spurline.errors import ConfigError, DataError, RunFailedError
from spurline_reward_models.configs import JudgeConfig
from spurline_reward_models.judge import Judge
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer
from spurline_rl.scoring import terms_of_all

RUBRIC = "Level {level}. Is {response} the answer to {prompt}? It should be {reference}. {{}}"


class Server(ThreadingHTTPServer):
    """Gives marks by the number of digits of the answer. `replies` come first: a status, or the text of a reply."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[Any] = []
        self.replies: list[int | str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(content | {"key": self.headers["Authorization"]})
        said = content["messages"][0]["content"]
        answer = said.split("Is ")[-1].split(" the answer")[0]
        reply = json.dumps({"reason": "digits", "score": sum(map(str.isdigit, answer))})
        if self.server.replies:
            given = self.server.replies.pop(0)
            if isinstance(given, int):
                self.send_error(given)
                return
            reply = given
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
        made = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        body = json.dumps(made).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as made:
        yield made


def judge_of(server: Server, **settings: Any) -> Judge:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    return Judge(JudgeConfig(**{"url": url, "model": "m", "retries": 1, "rubric": RUBRIC, "scale": (0, 4), **settings}))


def answer_of(response: str) -> Answer:
    return Answer("2+2=", response, "4", {"level": 3})


def test_a_mark_is_its_share_of_the_scale_and_costs_are_told(server: Server) -> None:
    asked = [answer_of("12"), answer_of("x"), answer_of("1234")]
    judge = judge_of(server)
    assert asyncio.run(terms_of_all({"mark": judge}, asked)) == [{"mark": 0.5}, {"mark": 0.0}, {"mark": 1.0}]
    judge.close()
    said = {content["messages"][0]["content"] for content in server.requests}
    assert any(text.startswith("Level 3. Is 12 the answer to 2+2=? It should be 4. {}\n") for text in said)
    for content in server.requests:
        assert (content["temperature"], content["seed"], content["key"]) == (0, 0, "Bearer none")
        schema = content["response_format"]["json_schema"]["schema"]
        assert schema["properties"]["score"] == {"type": "number", "minimum": 0, "maximum": 4}
    for answer in asked:
        assert answer.metrics.pop("scoring/mark/seconds") > 0
        numbers = {"cached": 0, "prompt_tokens": 7, "completion_tokens": 5}
        assert answer.metrics == {f"scoring/mark/{name}": value for name, value in numbers.items()}


def test_equal_answers_at_the_same_time_are_one_request_and_two_judges_tell_their_own_costs(server: Server) -> None:
    asked = [answer_of("12"), answer_of("12"), answer_of("12")]
    judges = {"mark": judge_of(server), "brief": judge_of(server, rubric="Is {response} the answer?")}
    assert asyncio.run(terms_of_all(judges, asked)) == [{"mark": 0.5, "brief": 0.5}] * 3
    assert len(server.requests) == 2
    for term in judges:
        assert sum(answer.metrics[f"scoring/{term}/cached"] for answer in asked) == 2


def test_a_request_is_asked_once_and_a_file_keeps_marks_for_other_runs(server: Server, tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost"):
        url = f"http://{host}:{server.server_address[1]}/v1"
        judge = judge_of(server, url=url, cache=str(tmp_path / "marks.sqlite"))
        assert [judge.score(answer) for answer in [answer_of("12")] * 2] == [0.5, 0.5]
        judge.close()
    assert len(server.requests) == 1
    again = answer_of("12")
    assert judge_of(server, cache=str(tmp_path / "marks.sqlite"), max_new_tokens=9).score(again) == 0.5
    assert len(server.requests) == 2, "another request has the mark of its own"


def test_a_failed_request_is_repeated_and_a_strange_reply_fails_the_attempt(server: Server) -> None:
    server.replies = [503]
    assert judge_of(server).score(answer_of("1")) == 0.25
    for reply, reason in [
        ("well done", r"no score: 'well done' \(finish reason stop\)"),
        ('{"score": 5}', "gave 5, which is not on the scale from 0 to 4"),
        ('{"score": "many"}', "no score"),
        ("[1]", "no score"),
    ]:
        server.replies = [reply]
        with pytest.raises(AttemptFailedError, match=reason):
            judge_of(server).score(answer_of("1"))
    # 400 is vLLM's answer to a text that is too long.
    for replies in ([500, 500], [400]):
        server.replies = [*replies]
        with pytest.raises(AttemptFailedError, match="failed"):
            judge_of(server).score(answer_of("1"))
    server.replies = [404]
    with pytest.raises(RunFailedError, match="refused a request"):
        judge_of(server).score(answer_of("1"))


def test_what_cannot_be_judged_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"names \{levle\}.*Did you mean 'level'"):
        judge_of(server, rubric="{levle} {response}").score(answer_of("1"))
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="key is not set: JUDGE_KEY"):
        judge_of(server, api_key_env="JUDGE_KEY")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge_of(server, api_key_env="JUDGE_KEY").score(answer_of("1"))
    assert server.requests[-1]["key"] == "Bearer secret"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"scale": (1, 1)}, "Give the worst mark first"),
        ({"rubric": "{response"}, "not a template"),
        ({"rubric": "{response} {a.b}"}, "is no column"),
        ({"rubric": "{prompt}"}, "every answer would get one mark"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], problem: str) -> None:
    [found] = JudgeConfig(url="http://x", model="m", **settings).problems(None)  # type: ignore[arg-type]
    assert problem in str(found)
