"""uvicorn's HTTP/1.1, with a problem document for what is not HTTP at all and so never reaches the app."""

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mooring.core import ids
from mooring.core.errors import BadRequest
from mooring.db.types import new_id
from mooring.schemas.base import PROBLEM_MEDIA_TYPE, Problem


class HttpProtocol(HttpToolsProtocol):
    def send_400_response(self, msg: str) -> None:
        request_id = new_id(ids.REQUEST)
        problem = Problem(
            type="urn:mooring:error:malformed_request",
            title=BadRequest.title,
            status=400,
            detail=msg,
            instance=None,
            code="malformed_request",
            request_id=request_id,
            retryable=False,
        )
        body = to_json(problem.model_dump(exclude={"errors"}))
        head = (
            f"HTTP/1.1 400 Bad Request\r\nContent-Type: {PROBLEM_MEDIA_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\nX-Request-Id: {request_id}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
