"""The page of `spurline view` over HTTP: who gets in, what is found, and that nothing is written."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from viewed_runs import add_step, write_rollouts, write_run

pytest.importorskip("starlette", reason="needs the extra spurline-insight[view]")
pytest.importorskip("httpx", reason="Starlette's test client needs httpx")

from starlette.testclient import TestClient

from spurline.errors import PluginError, RunDirectoryError, UserError
from spurline_insight.view import command
from spurline_insight.view.app import make_app
from spurline_insight.view.guard import Guard
from spurline_insight.view.runs import open_runs
from spurline_rl.kept_rollouts import ROLLOUTS_FOLDER, reader
from spurline_rl.viewing import answers

TOKEN = "a-token-of-the-test"
HOME = "http://127.0.0.1:8123"


def client_of(*folders: Path, base_url: str = HOME, enters: bool = True) -> TestClient:
    guard = Guard(make_app(open_runs(folders)), TOKEN, 8123)
    client = TestClient(guard, base_url=base_url)
    if enters:
        client.get("/", params={"token": TOKEN})
    return client


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def found(client: TestClient, **query: Any) -> list[tuple[int, int]]:
    """Step and place of what a filter finds, in order."""
    answer = client.get("/api/rollouts", params={"run": 0, **query}).json()
    assert answer["error"] is None
    assert answer["matching"] == len(answer["rows"])
    return [(row["step"], row["place"]) for row in answer["rows"]]


# Who gets in


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/runs", "/api/attempt?run=0&step=1&place=0", "/nothing"])
@pytest.mark.parametrize("token", ["", "?token=", "?token=wrong", f"?token={TOKEN}x", "?token=%ff%00é"])
def test_nothing_is_told_without_the_token(run: Path, path: str, token: str) -> None:
    answer = client_of(run, enters=False).get(path.partition("?")[0] + token)
    assert answer.status_code == 403
    assert "run" not in answer.text.replace("spurline view", "")


def test_the_first_visit_leaves_a_cookie_and_an_address_without_the_token(run: Path) -> None:
    client = client_of(run, enters=False)
    answer = client.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert client.get("/api/runs").status_code == 200


def test_the_token_for_one_visit_lets_in_once(run: Path) -> None:
    guard = Guard(make_app(open_runs([run])), TOKEN, 8123)
    once = guard.one_visit
    statuses = [
        TestClient(guard, base_url=HOME).get("/", params={"token": once}, follow_redirects=False).status_code
        for _ in range(2)
    ]
    assert statuses == [303, 403]


@pytest.mark.parametrize("host", ["evil.example:8123", "evil.example", "127.0.0.1.evil.example:8123", ""])
def test_a_name_that_others_make_point_here_is_refused(run: Path, host: str) -> None:
    answer = client_of(run).get("/api/runs", headers={"host": host})
    assert answer.status_code == 400


def test_every_answer_forbids_scripts_of_others_frames_and_reading_by_other_sites(run: Path) -> None:
    client = client_of(run)
    for path in ("/", "/page.js", "/api/runs", "/nothing", "/api/attempt?run=9&step=1&place=0"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        for rule in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"):
            assert rule in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_it_listens_on_the_loopback_alone() -> None:
    with command._listening(0) as listener:
        address, port = listener.getsockname()
        assert address == "127.0.0.1"
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            command._listening(port)
        assert listener.family == socket.AF_INET


# What is asked for


@pytest.mark.parametrize(
    "path",
    [
        "/../config.json",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/config.json",
        "/static/page.js",
        "//etc/passwd",
        "/api/runs/../../config.json",
        "/config.json",
    ],
)
def test_no_path_of_a_request_reaches_the_files(run: Path, path: str) -> None:
    answer = client_of(run).get(HOME + path)
    assert answer.status_code == 404
    assert "max_staleness" not in answer.text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/rollouts?run=../run", 400),
        ("/api/rollouts?run=1", 404),
        ("/api/rollouts?run=-1", 404),
        ("/api/rollouts?run=0&sort=__class__", 400),
        ("/api/rollouts?run=0&min_reward=much", 400),
        ("/api/rollouts?run=0&limit=100000", 400),
        ("/api/attempt?run=0&step=1&place=-1", 404),
        ("/api/attempt?run=0&step=1&place=99", 404),
        ("/api/attempt?run=0&step=99999999999999999999&place=0", 404),
        ("/api/attempt?run=0", 400),
        ("/api/rollouts?run=0&min_step=99999999999999999999&offset=99999999999999999999", 200),
    ],
)
def test_what_is_asked_wrongly_is_said_and_ends_nothing(run: Path, path: str, status: int) -> None:
    client = client_of(run)
    answer = client.get(path)
    assert answer.status_code == status
    assert (status == 200) == ("error" not in answer.json() or answer.json()["error"] is None)
    assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch", "options"])
def test_a_request_can_only_read(run: Path, method: str) -> None:
    client = client_of(run)
    assert {client.request(method, path).status_code for path in ("/", "/api/runs", "/api/rollouts")} == {405}


def test_looking_writes_nothing(run: Path) -> None:
    def contents() -> Mapping[str, bytes]:
        return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    before = contents()
    client = client_of(run)
    for path in ("runs", "series?metric=loss", "evaluations", "rollouts?run=0", "attempt?run=0&step=1&place=0"):
        assert client.get(f"/api/{path}").status_code == 200
    assert contents() == before


# Curves and evaluations


def test_curves_of_several_runs_and_tables_of_each_set(tmp_path: Path) -> None:
    client = client_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=2, loss=4.0))
    runs = client.get("/api/runs").json()
    assert [(run["name"], run["status"], run["step"], run["max_age"]) for run in runs] == [
        ("a", "finished", 3, 1),
        ("b", "finished", 2, 1),
    ]
    series = client.get("/api/series", params={"metric": "loss"}).json()[1]
    assert series == {"steps": [1, 2], "values": [4.0, 2.0], "means": [3.0, 3.0]}
    tables = client.get("/api/evaluations").json()[0]["tables"]
    assert [(table["set"], table["metrics"], len(table["rows"])) for table in tables] == [
        ("", ["pass@1"], 3),
        ("hard", ["pass@1"], 3),
    ]
    assert tables[1]["rows"][0] == {"step": 1, "values": [0.25]}


def test_a_run_that_cannot_be_read_is_told_beside_the_others(tmp_path: Path) -> None:
    client = client_of(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    (tmp_path / "a" / "metrics.jsonl").write_text("nonsense\n")
    first, second = client.get("/api/runs").json()
    assert "metrics.jsonl" in first["error"]
    assert second["step"] == 3
    assert client.get("/api/series", params={"metric": "loss"}).json()[1]["steps"] == [1, 2, 3]


def test_a_run_whose_process_died_is_interrupted(tmp_path: Path) -> None:
    client = client_of(write_run(tmp_path / "a", summary={"status": "running"}))
    assert client.get("/api/runs").json()[0]["status"] == "interrupted"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirectoryError, match=r"run directory|no such folder"):
            open_runs([folder])


# Rollouts


def test_attempts_are_found_by_number_prompt_tag_and_text(run: Path) -> None:
    client = client_of(run)
    every = {(step, place) for step in (1, 2, 3) for place in range(4)}
    assert set(found(client)) == every
    assert set(found(client, min_reward=0.2, max_reward=0.3)) == {(step, 2) for step in (1, 2, 3)}
    assert set(found(client, min_step=2, max_step=2)) == {(2, place) for place in range(4)}
    assert set(found(client, min_age=2)) == {(step, 2) for step in (1, 2, 3)}
    assert set(found(client, min_gap=1.5)) == {(step, 0) for step in (1, 2, 3)}
    assert set(found(client, prompt="<B>html")) == {(step, place) for step in (1, 2, 3) for place in (2, 3)}
    assert set(found(client, prompt="rows:0@20")) == {(2, 0), (2, 1)}
    assert set(found(client, tag="kind=sort")) == {(step, place) for step in (1, 2, 3) for place in (0, 1)}
    assert set(found(client, tag="level=1.0", max_step=1)) == {(1, 2), (1, 3)}
    assert found(client, tag="level=1") == []
    assert found(client, text="3 2 1 AT 2") == [(2, 1)]
    assert found(client, text="3 2 1", min_reward=0.5) == []
    assert found(client, status="filtered") == []
    assert set(found(client, status="trained", run=0, min_reward="")) == every


def test_lists_are_ordered_and_cut_into_pages(run: Path) -> None:
    client = client_of(run)
    assert found(client)[:2] == [(3, 0), (3, 1)]
    lowest = client.get("/api/rollouts?run=0&sort=reward&ascending=true&limit=4").json()
    assert [(row["reward"], row["step"]) for row in lowest["rows"]] == [(-1.0, 3), (-1.0, 2), (-1.0, 1), (0.0, 3)]
    assert {row["begins"].split()[0] for row in lowest["rows"]} == {"Sort", "Write"}
    assert lowest["matching"] == 12
    rest = client.get("/api/rollouts?run=0&sort=reward&ascending=true&limit=4&offset=10").json()
    assert [row["reward"] for row in rest["rows"]] == [1.0, 1.0]


def test_an_attempt_is_told_token_by_token(run: Path) -> None:
    attempt = client_of(run).get("/api/attempt?run=0&step=2&place=2").json()
    assert (attempt["reward"], attempt["tags"]["kind"], attempt["info"]) == (0.25, "Write", {"note": "<b>0</b>"})
    (turn,) = attempt["turns"]
    response = turn["response"]
    assert "".join(turn["prompt"]["pieces"]) == "Write <b>HTML</b>"
    assert "".join(response["pieces"]).startswith("<img src=x onerror=window.hacked=1>\x1b[31m")
    assert response["ages"][:6] == [2, 2, 2, 2, 1, 0]
    assert response["trained"][:6] == [0, 0, 0, 0, 1, 1]
    assert response["special"] == [len(response["pieces"]) - 1]
    assert set(response["gap"]) == {0.0}
    assert all(abs(value - 0.3) < 1e-4 for value in response["advantages"])


def test_an_answer_is_json_whatever_a_run_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", steps=0)
    (run / "summary.json").write_text('{"status": "failed", "error": "\\ud800", "total_steps": NaN}')

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    (state,) = json.loads(client_of(run).get("/api/runs").content, parse_constant=refuse)
    assert (state["error"], state["total_steps"]) == ("\ud800", "nan")


def test_prompts_that_were_given_up_are_told_by_step_and_uid(run: Path) -> None:
    client = client_of(run)
    assert client.get("/api/rollouts?run=0").json()["given_up"] == {"matching": 0, "prompts": []}
    write_rollouts(run, 4, {"Sort 2 1": [("1 2", 1.0, 0)]}, {"rows:7@4": "the judge is gone", "rows:8@4": "<b>"})
    write_rollouts(run, 5, {"Sort 2 1": [("1 2", 1.0, 0)]}, {"rows:7@5": "again"})

    def told(query: str) -> list[tuple[int, str, str]]:
        given_up = client.get(f"/api/rollouts?run=0{query}").json()["given_up"]
        return [(prompt["step"], prompt["uid"], prompt["reason"]) for prompt in given_up["prompts"]]

    assert told("") == [(5, "rows:7@5", "again"), (4, "rows:7@4", "the judge is gone"), (4, "rows:8@4", "<b>")]
    assert told("&min_step=5") == [(5, "rows:7@5", "again")]
    assert told("&prompt=ROWS:8") == [(4, "rows:8@4", "<b>")]
    assert told("&max_step=3") == []
    assert len(found(client, min_step=4)) == 2


# Live runs


def test_what_a_live_run_adds_is_found_and_old_steps_are_not_read_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(run)
    assert len(found(client)) == 12
    add_step(run, 4)
    read: list[str] = []

    def read_step(path: Path, columns: Any) -> Any:
        read.append(path.name)
        return reader.read_step(path, columns)

    monkeypatch.setattr(answers, "read_step", read_step)
    assert found(client, min_step=4) == [(4, 0), (4, 1), (4, 2), (4, 3)]
    assert len(found(client)) == 16
    assert read == ["step-000004.parquet"]
    assert client.get("/api/runs").json()[0]["step"] == 4
    assert client.get("/api/series?metric=loss").json()[0]["steps"] == [1, 2, 3, 4]


def test_steps_that_a_resumed_run_made_anew_take_the_place_of_the_old_ones(run: Path) -> None:
    client = client_of(run)
    assert found(client, text="at 3")
    write_rollouts(run, 3, {"Other prompt": [("made again", 0.5, 0)]})
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "new").write_text(lines[0] + "\n")
    (run / "new").replace(run / "metrics.jsonl")
    assert found(client, min_step=3) == [(3, 0)]
    assert found(client, text="made again") == [(3, 0)]
    assert len(found(client)) == 9
    assert client.get("/api/runs").json()[0]["step"] == 1


def test_a_damaged_file_is_told_and_what_was_read_of_it_stays(run: Path) -> None:
    client = client_of(run)
    assert len(found(client)) == 12
    (run / ROLLOUTS_FOLDER / "step-000004.parquet").write_bytes(b"x" * 100)
    answer = client.get("/api/rollouts?run=0").json()
    assert "step-000004.parquet" in answer["error"]
    assert answer["matching"] == 12


def test_a_folder_that_goes_away_is_an_empty_list_and_no_failure(run: Path) -> None:
    client = client_of(run)
    assert len(found(client)) == 12
    shutil.rmtree(run / ROLLOUTS_FOLDER)
    assert found(client) == []
    assert client.get("/api/attempt?run=0&step=1&place=0").status_code == 404


# Answers of other packages


def install(site: Path, package: str, text: str) -> None:
    """Leave a distribution that answers with the function `answers` of this text."""
    site.mkdir(exist_ok=True)
    module = f"view_answers_of_{package}"
    (site / f"{module}.py").write_text(text)
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[spurline.view]\n{package} = {module}:answers\n")


def test_an_installed_package_answers_questions_of_its_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "asked", "answers = lambda run_dirs: {'folders': lambda query: list(run_dirs)}")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert client_of(run).get("/api/folders").json() == [str(run)]


def test_a_package_whose_answers_cannot_be_had_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "failing", "def answers(run_dirs): raise ValueError('no')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(PluginError, match=r"^view_answers_of_failing:answers, which answers.*fails: ValueError: no"):
        client_of(run)
