# An image that runs `offload serve`; docs/how-to/docker.md says how.
#
#   docker build -t offload .                                  without a GPU
#   docker build -t offload:cuda --build-arg VARIANT=cuda .    CUDA's libraries come with torch
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
# Releases are constraints.txt's; Debian's packages have its security updates.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/offload
ENV PATH=/opt/offload/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
ARG VARIANT=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY constraints.txt ./
# hadolint ignore=DL3013
RUN torch="$(grep '^torch==' constraints.txt)" \
    && case "${VARIANT}" in \
        cpu) pip install --extra-index-url "${TORCH_INDEX}" "${torch}+cpu" ;; \
        cuda) pip install -c constraints.txt "${torch}" ;; \
        *) echo "VARIANT is cpu or cuda, got ${VARIANT}" >&2; exit 1 ;; \
    esac
COPY . .
# The embedded model, 92 MB, is what the image serves without an argument.
RUN pip install -c constraints.txt '.[serve]' \
    && offload download

FROM ${BASE}
ARG VARIANT=cpu
# Triton compiles a launcher for its kernels: with a GPU it needs a C compiler and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && if [ "${VARIANT}" = cuda ]; then \
        apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev; \
    fi \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /cache --shell /usr/sbin/nologin offload \
    && install --directory --owner=offload --group=offload /cache /sessions
COPY --from=build /opt/offload /opt/offload
ENV PATH=/opt/offload/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache/huggingface \
    NUMBA_CACHE_DIR=/cache/numba \
    OFFLOAD_CACHE=/cache/offload \
    TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /cache
VOLUME ["/cache", "/sessions"]
EXPOSE 8000
# 503 while the model loads, which the start period forgives, and when the engine has failed.
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=9)"]
ENTRYPOINT ["offload", "serve", "--host", "0.0.0.0", "--session-dir", "/sessions"]
CMD ["smollm2-135m-instruct"]
