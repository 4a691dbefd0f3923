"""Access rules of a server without a key.

It answers requests for an IP address or localhost, and on the loopback interface only those of its own user.
"""

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
# Tables of the connections (proc(5)). The columns that are read, counted from 0:
CONNECTIONS = ("/proc/net/tcp", "/proc/net/tcp6")
LOCAL_ADDRESS_COLUMN = 1
REMOTE_ADDRESS_COLUMN = 2
USER_COLUMN = 7

Address = tuple[str, int]


def is_address(host: str, own_host: str = "localhost") -> bool:
    """Return whether a Host header is an IP address, `localhost` or the server's own name, with or without a port.

    Other names are refused, because the owner of a foreign web page can make a name point to this machine and then read
    the answers in a visitor's browser (DNS rebinding).

    Args:
        host: The Host header.
        own_host: The name on which the server listens.

    >>> [is_address(host) for host in ("127.0.0.1:80", "[::1]", "localhost:8765", "evil.example:80", "")]
    [True, True, True, False, False]
    """
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", own_host) or bool(ipaddress.ip_address(name))
    return False


def may_read(client: Address, server: Address) -> bool:
    """Return whether the client of a connection may read: a process of this process's user, or of root.

    Clients on other machines always may: they can only connect if the user chose another address with `--host`.

    Args:
        client: Address and port of the client.
        server: Address and port of the server's end of the connection.
    """
    if not ipaddress.ip_address(client[0]).is_loopback or not os.path.exists(CONNECTIONS[0]):
        return True
    return _user_of(client, server) in (os.geteuid(), 0)


def _user_of(client: Address, server: Address) -> int | None:
    """Return the id of the user whose process is the client; None if the kernel lists no such connection."""
    # Parsing a line is slow, so lines with other ports are skipped first
    ports_pattern = re.compile(rf":{client[1]:04X} \w+:{server[1]:04X} ")
    for path in CONNECTIONS:
        with suppress(FileNotFoundError):  # the kernel may lack IPv6
            for line in filter(ports_pattern.search, Path(path).read_text().splitlines()):
                columns = line.split()
                is_client = _parsed(columns[LOCAL_ADDRESS_COLUMN]) == _normal(client)
                if is_client and _parsed(columns[REMOTE_ADDRESS_COLUMN]) == _normal(server):
                    return int(columns[USER_COLUMN])
    return None


def _parsed(column: str) -> Address:
    """Return the address and the port of a column.

    The kernel prints an address as words of four bytes, each in the byte order of the machine.
    """
    address_text, port_text = column.split(":")
    packed_address = b""
    for start in range(0, len(address_text), 8):
        word = int(address_text[start : start + 8], 16)
        packed_address += word.to_bytes(4, sys.byteorder)
    family = socket.AF_INET if len(packed_address) == 4 else socket.AF_INET6
    return _normal((socket.inet_ntop(family, packed_address), int(port_text, 16)))


def _normal(address: Address) -> Address:
    """Return the address in a form that can be compared.

    A socket for IPv4 and IPv6 has an IPv4 address in an IPv6 form, which is converted. The zone of an address is removed.
    """
    host, port = address
    ip_address = ipaddress.ip_address(host.partition("%")[0])
    ipv4_address = ip_address.ipv4_mapped if isinstance(ip_address, ipaddress.IPv6Address) else None
    return str(ipv4_address or ip_address), port
