# One image for all of Mooring: `server` by default, `gateway` for SSH, `agent` on a node (docker-compose.yml shows both).
#
# BASE is any Debian-like image with Python 3.11 or later with its venv module. It is pinned by digest, so that a moved
# tag changes nothing; update it (docker buildx imagetools inspect python:3.12-slim) with each release.
ARG BASE=python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# Packages change less often than the program, so their layer comes first and is reused until a pin changes.
COPY requirements.txt requirements-build.txt ./
RUN python3 -m venv /build \
    && /build/bin/pip install --require-hashes -r requirements-build.txt \
    && python3 -m venv --without-pip /opt/mooring \
    && /build/bin/pip --python /opt/mooring/bin/python3 install --require-hashes --no-compile -r requirements.txt
COPY pyproject.toml README.md ./
COPY client client
COPY src src
COPY migrations migrations
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels ./client . \
    && /build/bin/pip --python /opt/mooring/bin/python3 install --no-deps --no-compile /wheels/*.whl \
    && python3 -m compileall -q /opt/mooring/lib

FROM ${BASE}
# For agents, whose packet filter rules isolate instances from the node, for `mooring db backup`, and for `mooring toolbox`.
RUN { command -v iptables && command -v pg_dump && command -v rsync; } >/dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends iptables postgresql-client \
    busybox-static libnss-wrapper openssh-client openssh-sftp-server rsync \
    && rm -rf /var/lib/apt/lists/*; }
# User and group have fixed IDs, so that the next release can read an existing volume.
RUN groupadd --gid 10001 mooring \
    && useradd --uid 10001 --gid mooring --no-create-home --shell /usr/sbin/nologin mooring \
    && install -d -o mooring -g mooring -m 0700 /var/lib/mooring
COPY --from=build /opt/mooring /opt/mooring
ENV PATH=/opt/mooring/bin:$PATH PYTHONUNBUFFERED=1 MOORING_DATA_DIR=/var/lib/mooring
VOLUME /var/lib/mooring
EXPOSE 8700 8720 8722
# Not root: the server needs no access to its machine. An agent needs Docker's socket: run it with --user 0.
USER mooring
# For the server. An agent does not listen: run it with --no-healthcheck.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ.get(\"MOORING_PORT\", 8700)}/readyz', timeout=4)"]
ENTRYPOINT ["mooring"]
CMD ["server"]
