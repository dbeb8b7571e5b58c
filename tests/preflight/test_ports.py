"""Sockets that listen beyond loopback are seen, with their owners."""

from __future__ import annotations

import os
import socket

import pytest

from agentrl.preflight.ports import Listener, exposed_ray, listening

GCS = "/site-packages/ray/core/src/ray/gcs/gcs_server --x"


@pytest.mark.parametrize(
    ("family", "host", "loopback"),
    [
        (socket.AF_INET, "127.0.0.1", True),
        (socket.AF_INET, "0.0.0.0", False),
        (socket.AF_INET6, "::ffff:127.0.0.1", True),
        (socket.AF_INET6, "::", False),
    ],
)
def test_a_listening_socket_is_found_with_its_owner(family: int, host: str, loopback: bool) -> None:
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        (found,) = [listener for listener in listening() if listener.port == port]
    assert found.pid == os.getpid()
    assert found.loopback is loopback
    assert "python" in found.command


@pytest.mark.parametrize(
    ("listener", "exposed"),
    [
        (Listener("0.0.0.0", 6379, 1, GCS), True),
        (Listener("192.0.2.2", 40000, 1, GCS), True),
        (Listener("127.0.0.1", 6379, 1, GCS), False),
        (Listener("127.0.0.1", 8265, None, ""), False),
        (Listener("::", 8265, None, ""), True),  # another user's: the port has to speak
        (Listener("0.0.0.0", 6379, 1, "/usr/bin/redis-server"), False),
        (Listener("0.0.0.0", 22, None, ""), False),
    ],
)
def test_ray_is_told_by_its_processes_and_else_by_its_ports(listener: Listener, exposed: bool) -> None:
    assert bool(exposed_ray((listener,))) is exposed
