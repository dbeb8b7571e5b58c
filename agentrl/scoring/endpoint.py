"""An OpenAI-compatible service as a scoring backend, hosted or local (vLLM), through the `openai` client.

The API key is read from an environment variable and goes into the client alone; should a service's words repeat it,
it is taken out of them. Redirects are refused: they would carry prompts and key to another host.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentrl.config.schema import CoachConfig, JudgeConfig
from agentrl.errors import ConfigError, MissingError
from agentrl.scoring.client import Call, CallError, ScoringClient
from agentrl.scoring.quoting import plain_text
from agentrl.scoring.record import Reply

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_REFUSED_FORM = (400, 422)
_RETRIED = (408, 409, 425, 429)


def endpoint_client(config: JudgeConfig | CoachConfig, key: str) -> ScoringClient:
    """The client of a `judge` or `coach` section (`key`). Under replay no key is needed and nothing is opened.

    Raises `MissingError` when the key's environment variable is not set, and `ConfigError` for an address that is
    none.
    """
    assert config.model is not None
    assert config.base_url is not None
    backend = None if config.replay is not None else OpenAIBackend(config, key)
    return ScoringClient(config, config.model, backend)


class OpenAIBackend:
    """Chat completions of one model. The reply's form is forced by `response_format: json_schema`; a service that
    refuses this is asked without from then on, and the prompt's own words about the form must do."""

    def __init__(self, config: JudgeConfig | CoachConfig, key: str) -> None:
        assert config.base_url is not None
        if not config.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{key}.base_url: {config.base_url!r} is no http or https address", "write http://HOST/v1"
            )
        self._config = config
        self._secret = ""
        if config.api_key_env is not None:
            self._secret = os.environ.get(config.api_key_env, "")
            if not self._secret:
                raise MissingError(
                    f"{key}.api_key_env: the environment variable {config.api_key_env} is not set",
                    f"export {config.api_key_env}=... in the shell that runs this command",
                )
        self._opened: tuple[asyncio.AbstractEventLoop, AsyncOpenAI] | None = None
        self.forces_form = True

    async def complete(self, call: Call) -> Reply:
        """One call; a second one at once where the service turns out not to know `response_format`."""
        try:
            return await self._complete(call, self.forces_form)
        except _FormRefusedError:
            reply = await self._complete(call, False)
            self.forces_form = False
            return reply

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened[1].close()
            self._opened = None

    async def _complete(self, call: Call, forced: bool) -> Reply:
        import openai

        try:
            response = await self._client().chat.completions.create(**self._arguments(call, forced))
        except openai.APITimeoutError as error:
            limit = self._config.timeout_s
            raise CallError(f"no answer within {limit:g} s", retry=True, free=False) from error
        except openai.APIStatusError as error:
            raise self._refusal(error, forced) from error
        except openai.APIConnectionError as error:
            raise CallError(f"the service cannot be reached ({_cause(error)})", retry=True) from error
        except (openai.OpenAIError, ValueError) as error:
            # By its kind only: the words of such a fault may repeat what was sent.
            raise CallError(f"no usable answer ({type(error).__name__})", retry=True, free=False) from error
        return self._reply(response)

    def _arguments(self, call: Call, forced: bool) -> dict[str, Any]:
        config = self._config
        arguments: dict[str, Any] = {
            "model": config.model,
            "messages": [{"role": m.role, "content": plain_text(m.parts)} for m in call.messages],
            config.tokens_key: config.max_tokens,
        }
        if config.temperature is not None:
            arguments["temperature"] = config.temperature
        if forced:
            form = {"name": "reply", "strict": True, "schema": json.loads(call.schema)}
            arguments["response_format"] = {"type": "json_schema", "json_schema": form}
        return arguments

    def _refusal(self, error: Any, forced: bool) -> CallError:
        code = error.status_code
        if forced and code in _REFUSED_FORM:
            return _FormRefusedError("the service refuses response_format", retry=False)
        said = self._clean(_message(error.body))
        reason = f"HTTP {code}" + (f": {said}" if said else "")
        return CallError(reason, retry=code in _RETRIED or code >= 500, wait_s=_retry_after(error.response.headers))

    def _reply(self, response: Any) -> Reply:
        try:
            choice = response.choices[0]
            text, finish = choice.message.content, str(choice.finish_reason)
            usage = response.usage
            tokens = (0, 0) if usage is None else (int(usage.prompt_tokens), int(usage.completion_tokens))
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise CallError("the service answered with no chat completion", retry=True, free=False) from error
        if not isinstance(text, str):
            raise CallError("the service answered without text", retry=True, free=False)
        return Reply(self._scrubbed(text), *tokens, finish)

    def _scrubbed(self, text: str) -> str:
        return text.replace(self._secret, "[key]") if self._secret else text

    def _clean(self, text: str) -> str:
        return self._scrubbed(" ".join(text.split()))[:200]

    def _client(self) -> AsyncOpenAI:
        import openai

        loop = asyncio.get_running_loop()
        if self._opened is None or self._opened[0] is not loop:
            client = openai.AsyncOpenAI(
                api_key=self._secret or "none",
                base_url=self._config.base_url,
                max_retries=0,
                timeout=self._config.timeout_s,
                http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
            )
            self._opened = (loop, client)
        return self._opened[1]


class _FormRefusedError(CallError):
    """The service may not know `response_format`."""


def _message(body: object) -> str:
    """The words of an error body, in either of its usual shapes."""
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        said = inner.get("message", "") if isinstance(inner, Mapping) else inner
        return str(said)
    return body if isinstance(body, str) else ""


def _cause(error: BaseException) -> str:
    return type(error.__cause__ or error).__name__


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None
