"""Who listens beyond loopback? Read from /proc, so that nothing is connected to and no package is needed."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"
# Whoever reaches one of these runs code as this user: the cluster's head, its dashboard, its client server.
RAY_PORTS = {6379: "GCS", 8265: "dashboard", 10001: "client server"}
_RAY_PROCESSES = ("gcs_server", "ray/dashboard/dashboard.py", "ray.util.client.server", "raylet/raylet", "ray::")


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket. `command` is the owner's command line, empty where it cannot be seen."""

    address: str
    port: int
    pid: int | None
    command: str

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def exposed_ray(listeners: tuple[Listener, ...]) -> tuple[Listener, ...]:
    """The listeners beyond loopback that are Ray's: by their owner, or, where it cannot be seen, by Ray's ports."""
    return tuple(
        listener
        for listener in listeners
        if not listener.loopback
        and (
            any(name in listener.command for name in _RAY_PROCESSES) if listener.command else listener.port in RAY_PORTS
        )
    )


def listening(proc: Path = Path("/proc")) -> tuple[Listener, ...]:
    """Every listening TCP socket of this machine (of this network namespace), with its owner where it can be seen."""
    sockets: dict[str, tuple[str, int]] = {}
    for table in ("net/tcp", "net/tcp6"):
        for line in _read(proc / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTEN:
                host, _, hexadecimal = fields[1].partition(":")
                sockets[fields[9]] = (_address(host), int(hexadecimal, 16))
    owners = _owners(proc, set(sockets)) if sockets else {}
    found = []
    for inode, (address, port) in sockets.items():
        pid = owners.get(inode)
        command = _read(proc / str(pid) / "cmdline").replace("\0", " ").strip() if pid is not None else ""
        found.append(Listener(address, port, pid, command))
    return tuple(sorted(found, key=lambda listener: (listener.port, listener.address)))


def _address(raw: str) -> str:
    """/proc writes an address as 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _owners(proc: Path, inodes: set[str]) -> dict[str, int]:
    owners: dict[str, int] = {}
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        for link in _links(process / "fd"):
            inode = link.removeprefix("socket:[").removesuffix("]")
            if link.startswith("socket:[") and inode in inodes:
                owners.setdefault(inode, int(process.name))
    return owners


def _links(folder: Path) -> list[str]:
    links = []
    with contextlib.suppress(OSError):  # another user's process, or one that has just ended
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):  # closed since, as the listing's own descriptor is
                links.append(os.readlink(entry))
    return links


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
