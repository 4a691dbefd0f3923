"""Whom a server without a key answers: a request for an address, and on the loopback interface its own user."""

import ipaddress
import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

REFUSAL = "ask for an address, or for localhost"
REFUSAL_OF_USERS = "this run is another user's"
CONNECTIONS = (
    "/proc/net/tcp",
    "/proc/net/tcp6",
)  # proc(5): 2nd column the own end, 3rd the other, 8th the user id

Address = tuple[str, int]


def is_address(host: str, own_host: str = "localhost") -> bool:
    """Return whether no foreign server can have chosen this Host header (a defense against DNS rebinding).

    An address, `localhost` and the server's own name, with or without a port, pass.

    >>> [is_address(host) for host in ("127.0.0.1:80", "[::1]", "localhost:8765", "evil.example:80", "")]
    [True, True, True, False, False]
    """
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", own_host) or bool(ipaddress.ip_address(name))
    return False


def may_read(client: Address, server: Address) -> bool:
    """Return whether the user at the other end of a connection is ours, or root.

    Connections from other machines always pass: they exist only if the user chose another address with --host.
    """
    if not ipaddress.ip_address(client[0]).is_loopback or not os.path.exists(CONNECTIONS[0]):
        return True
    return _user_of(client, server) in (os.geteuid(), 0)


def _user_of(client: Address, server: Address) -> int | None:
    """Return the id of the user whose process connects to the server; None if the kernel lists no such connection."""
    ends = _normal(client), _normal(server)
    ports = re.compile(rf":{client[1]:04X} \w+:{server[1]:04X} ")  # most lines need not be parsed
    for path in CONNECTIONS:
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in filter(ports.search, Path(path).read_text().splitlines()):
                columns = line.split()
                if (_parsed(columns[1]), _parsed(columns[2])) == ends:
                    return int(columns[7])
    return None


def _parsed(column: str) -> Address:
    """Read an address and a port as the kernel prints them: words of four bytes, in the order of the machine."""
    address, port = column.split(":")
    packed = b"".join(
        int(address[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(address), 8)
    )
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return _normal((socket.inet_ntop(family, packed), int(port, 16)))


def _normal(address: Address) -> Address:
    """Return an IPv4 address as such, also where a socket for both kinds has it."""
    parsed = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed), address[1]
