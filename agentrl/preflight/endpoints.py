"""`check --deep`: do the services that a recipe names answer? At most 10 s in all."""

from __future__ import annotations

import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from functools import partial
from http.client import HTTPException
from typing import Any

from agentrl.config.schema import BaseRecipe, Endpoint

_TIMEOUT_S = 4.0
_DEADLINE_S = 9.0
_Answer = tuple[str, str, str]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the API key to another host, so it ends the request instead."""

    def redirect_request(self, *_: Any) -> None:
        return None


def probe(recipe: BaseRecipe) -> list[_Answer]:
    """Ask every endpoint for its models, and a Ray address for a connection. (key, cause, fix) of each that fails."""
    asked = [endpoint for endpoint in recipe.endpoints() if endpoint.url]
    tasks = [partial(_ask, endpoint) for endpoint in asked]
    keys = [endpoint.key for endpoint in asked]
    if recipe.launch.address is not None:
        tasks.append(partial(_connect, recipe.launch.address))
        keys.append("launch.address")
    answers: list[_Answer | None] = [(key, f"no answer within {_DEADLINE_S:g} s", "check the service") for key in keys]

    def run(index: int) -> None:
        answers[index] = tasks[index]()

    # Daemon threads, because a server that answers byte by byte outlives any timeout of a single read.
    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + _DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [answer for answer in tuple(answers) if answer is not None]


def _ask(endpoint: Endpoint) -> _Answer | None:
    url = endpoint.url.rstrip("/") + "/models"
    host = urllib.parse.urlsplit(url).hostname or url
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        return endpoint.key, f"{endpoint.url!r} is no http or https address", "write it as https://host/v1"
    request = urllib.request.Request(url)
    if endpoint.api_key_env and (secret := os.environ.get(endpoint.api_key_env)):
        request.add_header("Authorization", f"Bearer {secret}")
    try:
        with urllib.request.build_opener(_NoRedirects()).open(request, timeout=_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            named = endpoint.api_key_env or "an API key"
            return endpoint.key, f"{host} refuses the key (HTTP {error.code})", f"check {named}"
        if error.code == 404:
            return None  # a server without a list of models is there all the same
        return endpoint.key, f"{host} answers with HTTP {error.code}", "check the address and the service"
    except urllib.error.URLError as error:
        return endpoint.key, f"{host} cannot be reached ({error.reason})", "check the address and that the service runs"
    except (OSError, HTTPException, ValueError) as error:
        # By its kind only: a ValueError about a header would repeat the header, and with it the key.
        return endpoint.key, f"{host} gives no usable answer ({type(error).__name__})", "check the address and the key"


def _connect(address: str) -> _Answer | None:
    place = address.removeprefix("ray://")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        return "launch.address", f"{address!r} is not HOST:PORT", "name it as `ray status` does, such as 127.0.0.1:6379"
    try:
        with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S):
            return None
    except OSError as error:
        return (
            "launch.address",
            f"{address} cannot be reached ({error})",
            "start Ray there, or leave launch.address out",
        )
