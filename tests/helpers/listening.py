"""Which sockets the processes below one listen on, and which files are theirs, by /proc."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from async_grpo.processes.http_host import _parsed
from async_grpo.processes.process_tree import descendants

LISTENING, ACCEPTS = "0A", 0x10000  # proc(5): the state in /proc/net/tcp, a flag in /proc/net/unix


@dataclass(frozen=True)
class Listener:
    """A socket of a process: a TCP address with its port, or the name of a Unix socket."""

    pid: int
    command: str
    address: str
    port: int = 0


def listeners(root: int) -> list[Listener]:
    """All of the process and those below it."""
    owners: dict[str, int] = {}
    for pid in (root, *descendants(root)):
        with suppress(OSError):  # it has ended
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    name = os.readlink(entry.path)
                    if name.startswith("socket:["):
                        owners.setdefault(name[8:-1], pid)
    found = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(path).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENING and columns[9] in owners:
                pid = owners[columns[9]]
                found.append(Listener(pid, command_of(pid), *_parsed(columns[1])))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = line.split()
        if int(columns[3], 16) & ACCEPTS and columns[6] in owners:
            pid = owners[columns[6]]
            found.append(Listener(pid, command_of(pid), columns[7] if len(columns) > 7 else "@"))
    return found


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine beside those of the loopback interface."""
    addresses = [address for interface in psutil.net_if_addrs().values() for address in interface]
    return [a.address for a in addresses if a.family == socket.AF_INET and not a.address.startswith("127.")]
