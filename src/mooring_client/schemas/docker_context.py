"""The schema of the configuration of Docker clients."""

from typing import Annotated

from pydantic import ConfigDict, Field

from mooring_client.schemas.base import Answer


class DockerConfig(Answer):
    """The content of Docker's `config.json`."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    http_headers: Annotated[
        dict[str, str], Field(alias="HttpHeaders", description="the header with the API key of this request")
    ]


class DockerContext(Answer):
    """What Docker clients need to use instances as containers."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    config: Annotated[
        DockerConfig, Field(alias="config.json", description="the file in the folder `DOCKER_CONFIG`")
    ]
    host: Annotated[str, Field(description="the value of `DOCKER_HOST`")]
