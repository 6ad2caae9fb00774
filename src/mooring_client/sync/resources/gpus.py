# Generated from aio/resources/gpus.py: change that file, and run `make client`.
"""GPUs: their health, incidents and metrics; and what can be requested."""

from collections.abc import Sequence

from mooring_client.answers import model
from mooring_client.calls import Call, path
from mooring_client.schemas.gpus import Sample
from mooring_client.schemas.nodes import (
    Gpu,
    GpuIncident,
    GpuIncidentList,
    GpuList,
    InstanceType,
    InstanceTypeList,
)
from mooring_client.sync.paging import Pages
from mooring_client.sync.resources.base import Resource


class Gpus(Resource):
    """GPUs, and what can be requested: `client.gpus`."""

    def list(
        self,
        *,
        node_id: str | None = None,
        health: str | None = None,
        samples: bool | None = None,
        limit: int | None = None,
    ) -> Pages[Gpu]:
        """List GPUs.

        Args:
            samples: show the newest metrics of each too.
        """
        return Pages(
            self._transport,
            Call(
                operation="list_gpus",
                method="GET",
                path="/v1/gpus",
                read=model(GpuList),
                params={"node_id": node_id, "health": health, "samples": samples, "limit": limit},
            ),
        )

    def get(self, uuid: str) -> Gpu:
        """Get a GPU."""
        return self._transport.send(
            Call(
                operation="get_gpu",
                method="GET",
                path=path("/v1/gpus/{}", uuid),
                read=model(Gpu),
            )
        )

    def metrics(self, uuid: str) -> Sample:
        """Read the live sample of a GPU."""
        return self._transport.send(
            Call(
                operation="get_gpu_metrics",
                method="GET",
                path=path("/v1/gpus/{}/metrics", uuid),
                read=model(Sample),
            )
        )

    def incidents(self, uuid: str, *, limit: int | None = None) -> Pages[GpuIncident]:
        """List the incidents of a GPU, newest first."""
        return Pages(
            self._transport,
            Call(
                operation="list_gpu_incidents",
                method="GET",
                path=path("/v1/gpus/{}/incidents", uuid),
                read=model(GpuIncidentList),
                params={"limit": limit},
            ),
        )

    def clear(self, uuid: str) -> Gpu:
        """Return a quarantined GPU to service."""
        return self._transport.send(
            Call(
                operation="clear_gpu",
                method="POST",
                path=path("/v1/gpus/{}/clear", uuid),
                read=model(Gpu),
            )
        )

    def types(self) -> Sequence[InstanceType]:
        """What can be requested: models and numbers of GPUs, and how many could start now."""
        answer = self._transport.send(
            Call(
                operation="list_instance_types",
                method="GET",
                path="/v1/instance-types",
                read=model(InstanceTypeList),
            )
        )
        return answer.items
