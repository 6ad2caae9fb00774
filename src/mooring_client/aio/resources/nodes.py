"""Nodes: GPU servers, and the tokens that they join with."""

from collections.abc import Sequence

from mooring_client.aio.paging import AsyncPages
from mooring_client.aio.resources.base import AsyncResource
from mooring_client.answers import model, nothing
from mooring_client.calls import UNSET, Call, Unset, body, changes, if_match, path
from mooring_client.schemas.nodes import JoinToken, Node, NodeList


class AsyncNodes(AsyncResource):
    """GPU servers: `client.nodes`."""

    def list(self, *, name: str | None = None, limit: int | None = None) -> AsyncPages[Node]:
        """List nodes, newest first."""
        return AsyncPages(
            self._transport,
            Call(
                operation="list_nodes",
                method="GET",
                path="/v1/nodes",
                read=model(NodeList),
                params={"name": name, "limit": limit},
            ),
        )

    async def get(self, node_id: str) -> Node:
        """Get a node with its GPUs."""
        return await self._transport.send(
            Call(
                operation="get_node",
                method="GET",
                path=path("/v1/nodes/{}", node_id),
                read=model(Node),
            )
        )

    async def update(
        self, node_id: str, *, reserved_for: Sequence[str] | Unset | None = UNSET, version: int | None = None
    ) -> Node:
        """Change a node.

        Args:
            reserved_for: the only projects whose instances may be placed here; None: all.
            version: change it only if it still has this version (PreconditionFailed).
        """
        return await self._transport.send(
            Call(
                operation="update_node",
                method="PATCH",
                path=path("/v1/nodes/{}", node_id),
                read=model(Node),
                body=changes(reserved_for=reserved_for),
                headers=if_match(version),
            )
        )

    async def cordon(self, node_id: str) -> Node:
        """Place nothing new on a node."""
        return await self._transport.send(
            Call(
                operation="cordon_node",
                method="POST",
                path=path("/v1/nodes/{}/cordon", node_id),
                read=model(Node),
            )
        )

    async def uncordon(self, node_id: str) -> Node:
        """Place instances on a node again, and end its drain."""
        return await self._transport.send(
            Call(
                operation="uncordon_node",
                method="POST",
                path=path("/v1/nodes/{}/uncordon", node_id),
                read=model(Node),
            )
        )

    async def drain(self, node_id: str, *, deadline_s: int | None = None) -> Node:
        """Place nothing new on a node, and stop what is left at a deadline.

        Args:
            deadline_s: from now; None: nothing is stopped.
        """
        return await self._transport.send(
            Call(
                operation="drain_node",
                method="POST",
                path=path("/v1/nodes/{}/drain", node_id),
                read=model(Node),
                body=body(deadline_s=deadline_s),
            )
        )

    async def approve(self, node_id: str, *, difference_id: str | None = None) -> Node:
        """Accept what a node reports although it differs from the approved facts.

        Args:
            difference_id: `facts_changed.id` as you read it; fails if the node reports other facts now.
        """
        return await self._transport.send(
            Call(
                operation="approve_node",
                method="POST",
                path=path("/v1/nodes/{}/approve", node_id),
                read=model(Node),
                body=body(difference_id=difference_id),
            )
        )

    async def renew_credential(self, node_id: str) -> Node:
        """Make a node replace its credential."""
        return await self._transport.send(
            Call(
                operation="renew_credential",
                method="POST",
                path=path("/v1/nodes/{}/renew-credential", node_id),
                read=model(Node),
            )
        )

    async def delete(self, node_id: str, *, force: bool | None = None) -> None:
        """Remove a node.

        Args:
            force: although instances may still run on it: only if the machine is gone.
        """
        return await self._transport.send(
            Call(
                operation="delete_node",
                method="DELETE",
                path=path("/v1/nodes/{}", node_id),
                read=nothing,
                params={"force": force},
            )
        )

    async def create_join_token(self, *, ttl_s: int | None = None, node_name: str | None = None) -> JoinToken:
        """Create a token with which a machine joins once.

        Args:
            ttl_s: its lifetime; None: 3600.
            node_name: the only name that the node may have.
        """
        return await self._transport.send(
            Call(
                operation="create_join_token",
                method="POST",
                path="/v1/join-tokens",
                read=model(JoinToken),
                body=body(ttl_s=ttl_s, node_name=node_name),
            )
        )
