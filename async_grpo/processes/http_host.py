"""Access rules of an HTTP server that requires no key.

The server answers a request only if its Host header is an IP address or localhost. To requests from the same machine,
it answers only if they come from processes of its own user.
"""

import ipaddress
import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

REFUSAL = "use an IP address or localhost instead of this host name"
REFUSAL_OF_USERS = "this run belongs to another user"
# Tables of network connections (see proc(5)), and the numbers of the columns that are read, from 0
CONNECTIONS = ("/proc/net/tcp", "/proc/net/tcp6")
LOCAL_ADDRESS_COLUMN = 1
REMOTE_ADDRESS_COLUMN = 2
USER_COLUMN = 7

Address = tuple[str, int]


def is_address(host: str, own_host: str = "localhost") -> bool:
    """Return whether a Host header is an IP address, `localhost` or the server's own name, with or without a port.

    Other names are refused to prevent DNS rebinding: the owner of a malicious web page can make a domain name point to
    this machine, and then read the answers in a visitor's browser.

    Args:
        host: The Host header.
        own_host: The host name on which the server listens.

    >>> [is_address(host) for host in ("127.0.0.1:80", "[::1]", "localhost:8765", "evil.example:80", "")]
    [True, True, True, False, False]
    """
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name in ("localhost", own_host) or bool(ipaddress.ip_address(name))
    return False


def may_read(client: Address, server: Address) -> bool:
    """Return whether a client may read the answers. Its process must belong to this process's user or to root.

    Clients on other machines may always read: they can only connect if the user chose another address with `--host`.

    Args:
        client: Address and port of the client.
        server: Address and port of the server's end of the connection.
    """
    if not ipaddress.ip_address(client[0]).is_loopback or not os.path.exists(CONNECTIONS[0]):
        return True
    return _user_of(client, server) in (os.geteuid(), 0)


def _user_of(client: Address, server: Address) -> int | None:
    """Return the id of the user who owns the client's process; None if the kernel lists no such connection."""
    # Skip lines with other ports by this pattern, because parsing a line is slow
    ports_pattern = re.compile(rf":{client[1]:04X} \w+:{server[1]:04X} ")
    for path in CONNECTIONS:
        with suppress(FileNotFoundError):  # a kernel without IPv6 has no second table
            for line in filter(ports_pattern.search, Path(path).read_text().splitlines()):
                columns = line.split()
                is_client = _parsed(columns[LOCAL_ADDRESS_COLUMN]) == _normal(client)
                if is_client and _parsed(columns[REMOTE_ADDRESS_COLUMN]) == _normal(server):
                    return int(columns[USER_COLUMN])
    return None


def _parsed(column: str) -> Address:
    """Return the address and the port in a column of the table.

    The kernel prints an address as words of four bytes, each in the machine's byte order.
    """
    address_text, port_text = column.split(":")
    packed_address = b""
    for start in range(0, len(address_text), 8):
        word = int(address_text[start : start + 8], 16)
        packed_address += word.to_bytes(4, sys.byteorder)
    family = socket.AF_INET if len(packed_address) == 4 else socket.AF_INET6
    return _normal((socket.inet_ntop(family, packed_address), int(port_text, 16)))


def _normal(address: Address) -> Address:
    """Return the address in a normal form, so that the texts of equal addresses are equal.

    A socket for both IPv4 and IPv6 writes IPv4 addresses in an IPv6 form, which is converted to IPv4. The zone of an
    IPv6 address is removed.
    """
    host, port = address
    ip_address = ipaddress.ip_address(host.partition("%")[0])
    ipv4_address = ip_address.ipv4_mapped if isinstance(ip_address, ipaddress.IPv6Address) else None
    return str(ipv4_address or ip_address), port
