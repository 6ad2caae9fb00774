"""What a request to the port proxy names: a port, and a path for its program."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import h11

from mooring.core import port_urls
from mooring.core.port_urls import PortAddress, PortUrls
from mooring.gateway.ports import heads
from mooring.gateway.ports.callers import PortRequest
from mooring.gateway.ports.heads import Fields, Network
from mooring_client.errors import NotFound

_NO_PORT: Final = (
    "this URL names no port of an instance; `endpoints` of an instance shows the URLs of its ports"
)


@dataclass(frozen=True, slots=True)
class PortCall:
    """A request for a port.

    Attributes:
        whole_path: as the client sent it, without the query.
        addresses: the value of X-Forwarded-For for the program.
    """

    request: PortRequest
    whole_path: bytes
    addresses: str


def call_of(
    urls: PortUrls, request: h11.Request, fields: Fields, peer: str, trusted: Sequence[Network]
) -> PortCall | bytes:
    """The call; bytes: the path to redirect to.

    Args:
        trusted: networks of proxies in front.

    Raises:
        NotFound: it names no port.
    """
    path, mark, query = request.target.partition(b"?")
    host = heads.value_of(fields, b"host") or b""
    text = path.decode("latin-1")
    address: PortAddress | None
    prefix = ""
    if urls.domain:
        address = urls.in_host(host.decode("latin-1"))
    else:
        found = port_urls.in_path(text)
        address = None
        if found is not None:
            address, text = found
            prefix = port_urls.path_prefix(address.instance_id or "", address.port)
    if address is None:
        raise NotFound(_NO_PORT)
    if not text:
        return prefix.encode() + mark + query
    client, addresses = heads.client_addresses(peer, fields, trusted)
    made = PortRequest(
        address=address,
        method=request.method,
        host=host,
        path=text.encode("latin-1"),
        query=query if mark else None,
        fields=fields,
        client=client,
        prefix=prefix,
        is_secure=urls.scheme == "https",
    )
    return PortCall(made, path, addresses)
