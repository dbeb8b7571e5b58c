"""The scoring client over the real `openai` client against a local server: retries, limits, budget, record, secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from fake_openai import Window, completion, judge_config, say, serving

from agentrl.config.schema import PriceConfig
from agentrl.errors import ConfigError, DataError, MissingError
from agentrl.scoring.client import Asked, ScoringClient
from agentrl.scoring.endpoint import OpenAIBackend, endpoint_client

KEY = "sk-very-secret-0123456789"


def _six(text: str) -> int:
    if text != "6":
        raise ValueError("not six")
    return 6


def _ask(client: ScoringClient, *texts: str, parse: Any = _six) -> list[Asked[Any]]:
    async def all_of_them() -> list[Asked[Any]]:
        try:
            return await asyncio.gather(*(client.ask(say(t), parse) for t in texts))
        finally:
            await client.close()

    return asyncio.run(all_of_them())


def test_an_answer_comes_back_parsed_with_what_it_took() -> None:
    with serving(lambda n, body: (200, "6")) as fake:
        client = endpoint_client(judge_config(fake.url, price=PriceConfig(input_per_million=100_000)), "judge")
        (asked,) = _ask(client, "how many?")
    assert asked.value == 6
    assert asked.reason is None
    assert asked.info == {
        "calls": 1,
        "retries": 0,
        "unreadable": 0,
        "input_tokens": 10,
        "output_tokens": 5,
        "cost_usd": pytest.approx(1.0),
    }
    assert client.meter.spent_usd == pytest.approx(1.0)
    body = fake.requests[0]
    assert body["response_format"]["type"] == "json_schema"
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object", "properties": {"n": {}}}
    assert body["temperature"] == 0.0
    assert body["max_tokens"] == 1024


def test_m05_failing_twice_then_answering_takes_three_calls() -> None:
    with serving(lambda n, body: (500, {"error": "down"}) if n < 2 else (200, "6")) as fake:
        client = endpoint_client(judge_config(fake.url, max_retries=2), "judge")
        (asked,) = _ask(client, "x")
    assert asked.value == 6
    assert len(fake.requests) == asked.info["calls"] == 3
    assert (asked.info["retries"], asked.info["unreadable"]) == (2, 0)


def test_m05_always_failing_is_missing_after_bounded_calls_and_counted() -> None:
    with serving(lambda n, body: (500, {"error": {"message": "no room"}})) as fake:
        client = endpoint_client(judge_config(fake.url, max_retries=3), "judge")
        (asked,) = _ask(client, "x")
    assert asked.value is None
    assert asked.reason == "HTTP 500: no room"
    assert len(fake.requests) == 4
    assert asked.info["retries"] == 3


def test_nonsense_is_shown_back_with_the_case_and_then_missing() -> None:
    with serving(lambda n, body: (200, "banana")) as fake:
        client = endpoint_client(judge_config(fake.url, max_retries=2), "judge")
        (asked,) = _ask(client, "the case")
    assert asked.value is None
    assert asked.reason == "unreadable reply: not six"
    assert (asked.info["retries"], asked.info["unreadable"]) == (2, 3)
    assert len(fake.requests) == 3
    second = fake.requests[1]["messages"]
    assert second[0]["content"] == "the case"
    assert second[1] == {"role": "assistant", "content": "banana"}
    assert 'keys "n"' in second[2]["content"]


def test_retries_are_shared_between_failures_and_unreadable_replies() -> None:
    answers = [(500, {}), (200, "no"), (500, {}), (200, "6")]
    with serving(lambda n, body: answers[n]) as fake:
        (asked,) = _ask(endpoint_client(judge_config(fake.url, max_retries=3), "judge"), "x")
        assert asked.value == 6
        assert asked.info["calls"] == len(fake.requests) == 4
    with serving(lambda n, body: answers[n]) as fake:
        (asked,) = _ask(endpoint_client(judge_config(fake.url, max_retries=2), "judge"), "x")
        assert asked.value is None
        assert len(fake.requests) == 3


def test_a_slow_service_is_cut_off_and_missing() -> None:
    with serving(lambda n, body: (200, "6"), delay_s=1.0) as fake:
        started = time.monotonic()
        (asked,) = _ask(endpoint_client(judge_config(fake.url, max_retries=0, timeout_s=0.3), "judge"), "x")
        took = time.monotonic() - started
    assert asked.value is None
    assert asked.reason == "no answer within 0.3 s"
    assert took < 2.5


def test_a_rate_limit_waits_as_long_as_the_service_says() -> None:
    with serving(lambda n, body: (200, "6") if n else (429, {}, {"Retry-After": "0.4"})) as fake:
        started = time.monotonic()
        (asked,) = _ask(endpoint_client(judge_config(fake.url), "judge"), "x")
    assert asked.value == 6
    assert time.monotonic() - started >= 0.4


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_model_is_not_tried_again(status: int) -> None:
    with serving(lambda n, body: (status, {"error": {"message": "no"}})) as fake:
        (asked,) = _ask(endpoint_client(judge_config(fake.url), "judge"), "x")
    assert asked.reason == f"HTTP {status}: no"
    assert len(fake.requests) == 1


def test_nobody_listening_is_missing() -> None:
    (asked,) = _ask(endpoint_client(judge_config("http://127.0.0.1:9/v1", max_retries=1), "judge"), "x")
    assert asked.value is None
    assert asked.reason is not None
    assert asked.reason.startswith("the service cannot be reached")
    assert asked.info["calls"] == 2


@pytest.mark.parametrize(
    "content",
    [{}, {"choices": []}, {"choices": None}, [], b"<html>sorry</html>", b"", completion(None), completion(["6"])],
    ids=["empty", "no choices", "null", "list", "html", "nothing", "no text", "parts"],
)
def test_what_is_no_chat_completion_is_missing(content: Any) -> None:
    with serving(lambda n, body: (200, content)) as fake:
        (asked,) = _ask(endpoint_client(judge_config(fake.url, max_retries=0), "judge"), "x")
    assert asked.value is None
    assert asked.reason


def test_a_service_without_response_format_is_asked_plainly_from_then_on() -> None:
    def script(n: int, body: dict[str, Any]) -> Any:
        return (400, {"error": {"message": "unknown field"}}) if "response_format" in body else (200, "6")

    with serving(script) as fake:
        client = endpoint_client(judge_config(fake.url, max_concurrent=1), "judge")
        asked = _ask(client, "a", "b", "c")
    assert [a.value for a in asked] == [6, 6, 6]
    assert ["response_format" in body for body in fake.requests] == [True, False, False, False]


def test_a_bad_request_that_is_not_about_the_form_is_missing() -> None:
    with serving(lambda n, body: (400, {"error": {"message": "too long"}})) as fake:
        client = endpoint_client(judge_config(fake.url), "judge")
        (asked,) = _ask(client, "a")
    assert asked.reason == "HTTP 400: too long"
    assert len(fake.requests) == 2


def test_a_redirect_is_not_followed() -> None:
    with serving(lambda n, body: (200, "6")) as other:
        to = {"Location": f"{other.url}/chat/completions"}
        with serving(lambda n, body: (307, {}, to)) as fake:
            (asked,) = _ask(endpoint_client(judge_config(fake.url, max_retries=0), "judge"), "x")
    assert asked.value is None
    assert other.requests == []


def test_no_more_calls_than_the_limit_are_in_flight() -> None:
    with serving(lambda n, body: (200, "6"), delay_s=0.05) as fake:
        asked = _ask(endpoint_client(judge_config(fake.url, max_concurrent=3), "judge"), *map(str, range(12)))
    assert [a.value for a in asked] == [6] * 12
    assert fake.most_in_flight == 3


def test_x03_a_budget_of_one_dollar_stops_the_call_that_would_be_the_101st() -> None:
    with serving(lambda n, body: (200, "6")) as fake:
        config = judge_config(fake.url, price=PriceConfig(per_call=0.01), budget=1.0, max_concurrent=8)
        client = endpoint_client(config, "judge")
        asked = _ask(client, *map(str, range(110)))
    assert len(fake.requests) == 100
    assert sum(a.value == 6 for a in asked) == 100
    assert client.meter.spent_usd == 1.0
    refused = [a.reason for a in asked if a.value is None]
    assert refused == ["the budget of 1 USD does not cover another call (1 spent, up to 0.01 more)"] * 10


def test_x03_calls_in_flight_count_against_the_budget() -> None:
    # Each call may cost 1.0 (16 sampled tokens), and costs 5/16 of it: the third can only start when others settled.
    with serving(lambda n, body: (200, completion("6", 1, 5)), delay_s=0.05) as fake:
        config = judge_config(
            fake.url, price=PriceConfig(output_per_million=62_500), budget=2.0, max_tokens=16, max_concurrent=8
        )
        client = endpoint_client(config, "judge")
        asked = _ask(client, *map(str, range(8)))
    assert fake.most_in_flight <= 2
    assert client.meter.spent_usd <= 2.0
    assert sum(a.value == 6 for a in asked) == len(fake.requests) == 4  # 4 * 0.3125 = 1.25; a fifth might reach 2.25


def test_a_call_without_an_answer_is_charged_as_if_it_had_one() -> None:
    with serving(lambda n, body: (200, "6"), delay_s=0.6) as fake:
        config = judge_config(fake.url, price=PriceConfig(per_call=0.5), budget=1.0, timeout_s=0.2, max_retries=5)
        client = endpoint_client(config, "judge")
        (asked,) = _ask(client, "x")
    assert client.meter.spent_usd == 1.0
    assert asked.reason is not None
    assert "budget" in asked.reason


def test_x03_replay_sends_nothing_and_gives_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"

    def script(n: int, body: dict[str, Any]) -> Any:
        text = body["messages"][0]["content"]
        answers = {"good": "6", "bad": "banana", "down": None}
        return (500, {}) if answers[text] is None else (200, answers[text])

    texts = ("good", "bad", "down", "good")
    with serving(script) as fake:
        config = judge_config(fake.url, max_retries=1, record=str(path), price=PriceConfig(input_per_million=3))
        first = _ask(endpoint_client(config, "judge"), *texts)
        recorded = len(fake.requests)
        replayed = judge_config(fake.url, max_retries=1, replay=str(path), price=PriceConfig(input_per_million=3))
        client = endpoint_client(replayed.model_copy(update={"api_key_env": "NOT_SET_ANYWHERE"}), "judge")
        again = _ask(client, *texts)
        assert len(fake.requests) == recorded
    assert again == first
    assert [a.value for a in first] == [6, None, None, 6]
    assert client.meter.calls == 0
    assert recorded == 1 + 2 + 2  # equal requests are sent once


def test_a_recording_that_goes_on_sends_only_what_is_new_or_failed(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with serving(lambda n, body: (500, {}) if n == 1 else (200, "6")) as fake:
        config = judge_config(fake.url, max_retries=0, record=str(path), max_concurrent=1)
        assert [a.value for a in _ask(endpoint_client(config, "judge"), "a", "b")] == [6, None]
        with path.open("ab") as file:
            file.write(b'{"key": "torn')
        assert [a.value for a in _ask(endpoint_client(config, "judge"), "a", "b", "c")] == [6, 6, 6]
        assert len(fake.requests) == 4
    assert all(json.loads(line)["key"] for line in path.read_text().splitlines())


def test_a_replay_without_the_request_is_missing_and_without_the_file_an_error(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with pytest.raises(DataError, match="no recording"):
        endpoint_client(judge_config("http://127.0.0.1:9/v1", replay=str(path)), "judge")
    path.write_text(
        '{"key": "other", "reply": {"text": "6", "input_tokens": 1, "output_tokens": 1, "finish_reason": "stop"}}\n'
    )
    (asked,) = _ask(endpoint_client(judge_config("http://127.0.0.1:9/v1", replay=str(path)), "judge"), "a")
    assert asked.reason == "the recording holds no such request"
    path.write_text('{"neither": 1}\n')
    with pytest.raises(DataError, match=r"record.jsonl:1"):
        endpoint_client(judge_config("http://127.0.0.1:9/v1", replay=str(path)), "judge")


def test_another_model_or_sampling_is_another_request(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9/v1"
    base = ScoringClient(judge_config(url), "m", OpenAIBackend(judge_config(url), "judge"))
    others = [
        ScoringClient(judge_config(url), "n", OpenAIBackend(judge_config(url), "judge")),
        ScoringClient(judge_config(url, temperature=1.0), "m", OpenAIBackend(judge_config(url), "judge")),
        ScoringClient(judge_config(url, max_tokens=77), "m", OpenAIBackend(judge_config(url), "judge")),
    ]
    requests = [base.request(say("x")), base.request(say("y")), base.request(say("x", repeat=1))]
    requests += [o.request(say("x")) for o in others]
    assert len({json.dumps(r, sort_keys=True) for r in requests}) == 6


def test_the_key_goes_to_the_service_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    path = tmp_path / "record.jsonl"
    caplog.set_level(logging.DEBUG)
    answers = [(200, f"you sent {KEY}"), (401, {"error": {"message": f"bad key {KEY}"}})]
    with serving(lambda n, body: answers[min(n, 1)]) as fake:
        config = judge_config(fake.url, api_key_env="A_KEY", max_retries=0, record=str(path), max_concurrent=1)
        asked = _ask(endpoint_client(config, "judge"), "a", "b", parse=str)
    assert fake.headers[0]["authorization"] == f"Bearer {KEY}"
    assert asked[0].value == "you sent [key]"
    assert asked[1].reason == "HTTP 401: bad key [key]"
    assert KEY not in path.read_text() + caplog.text + repr(asked) + "".join(capfd.readouterr())


def test_without_a_key_no_other_programs_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda n, body: (200, "6")) as fake:
        _ask(endpoint_client(judge_config(fake.url), "judge"), "a")
    assert KEY not in json.dumps(fake.headers)


def test_a_missing_key_and_a_bad_address_name_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(MissingError, match=r"judge\.api_key_env.*A_KEY"):
        endpoint_client(judge_config("http://127.0.0.1:9/v1", api_key_env="A_KEY"), "judge")
    with pytest.raises(ConfigError, match=r"coach\.base_url"):
        endpoint_client(judge_config("127.0.0.1:9"), "coach")


def test_the_limit_is_full_as_long_as_calls_wait_and_never_exceeded() -> None:
    with serving(Window(32, 256, "6")) as fake:
        client = endpoint_client(judge_config(fake.url, max_concurrent=32, timeout_s=120.0, max_retries=0), "judge")
        asked = _ask(client, *(f"action {i} " + "x" * 4_000 for i in range(256)))
    assert [a.value for a in asked] == [6] * 256
    assert fake.most_in_flight == 32
