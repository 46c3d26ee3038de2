# The image of draftwood: docs/image.md. VARIANT is cpu or cuda; both bases need a Python at the same path.
ARG VARIANT=cpu
ARG BASE_BUILD=docker.io/library/python:3.11-slim-bookworm
ARG BASE_RUN=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE_BUILD} AS build
ENV PATH=/opt/draftwood/bin:$PATH
WORKDIR /source
RUN python3 -m venv /opt/draftwood
COPY pylock.toml tools/distributions/locked_versions.py ./
RUN python3 locked_versions.py pylock.toml > constraints.txt

# From its own index, PyPI's torch on Linux brings 3 GB of CUDA. An empty TORCH_INDEX means pip's own configuration.
FROM build AS torch-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --no-deps --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch

FROM build AS torch-cuda
RUN pip install --no-cache-dir --constraint constraints.txt torch accelerate

# hadolint ignore=DL3006
FROM torch-${VARIANT} AS installed
WORKDIR /source
COPY protos protos
COPY clients/python clients/python
COPY strategies strategies
COPY memory memory
COPY tenants tenants
COPY model_runner model_runner
COPY service service
# Two steps: each is asked for by file, so that none is looked for in an index. Without benchmarks.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./strategies ./memory ./clients/python ./tenants ./model_runner ./service \
    && pip install --no-cache-dir --constraint constraints.txt \
        /wheels/draftwood_*.whl "$(echo /wheels/draftwood-*.whl)[embedded,gateway,s3,telemetry]" \
    && pip check
# Headers, tests and tools to compile extensions, which need a compiler anyway.
RUN site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
    && rm -rf "$site/torch/include" "$site/torch/test" "$site/torch/share" "$site/openvino/include" \
    && find "$site/torch/bin" -type f ! -name torch_shm_manager -delete
# For any CPU of the architecture, not for the one that builds.
ENV NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES=
COPY benchmarks benchmarks
COPY tools/fill_compiled.py tools/
# Elsewhere, so that Python imports what is installed and not what lies here.
WORKDIR /
RUN NUMBA_CACHE_DIR=/opt/draftwood/compiled PYTHONPATH=/source/benchmarks python /source/tools/fill_compiled.py \
    && pip uninstall --yes pip setuptools \
    && mkdir -p /image/var/lib/draftwood /image/var/cache/draftwood \
    && chmod -R g=u /image/var

FROM ${BASE_RUN} AS run-cpu

FROM run-cpu AS run-cuda
# Triton compiles its launcher, in C, at the first kernel's call; Python's headers are in the base.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# hadolint ignore=DL3006
FROM run-${VARIANT}
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="draftwood" \
    org.opencontainers.image.description="Lossless speculative decoding as a gRPC service" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
COPY --from=installed /opt/draftwood /opt/draftwood
# Group 0 may write as well: a cluster that chooses users, such as OpenShift, gives them that group.
COPY --from=installed --chown=10001:0 /image/var/lib/ /var/lib/
COPY --from=installed --chown=10001:0 /image/var/cache/ /var/cache/
ENV PATH=/opt/draftwood/bin:$PATH \
    HOME=/var/lib/draftwood \
    USER=draftwood \
    XDG_CACHE_HOME=/var/cache \
    XDG_DATA_HOME=/var/lib \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NUMBA_CPU_NAME=generic \
    NUMBA_CPU_FEATURES= \
    NUMBA_CACHE_DIR=/tmp/draftwood-compiled \
    DRAFTWOOD_COMPILED_FUNCTIONS=/opt/draftwood/compiled
USER 10001:10001
WORKDIR /var/lib/draftwood
VOLUME ["/var/lib/draftwood", "/var/cache/draftwood"]
# Calls, health, metrics.
EXPOSE 50051 50052 9464
STOPSIGNAL SIGTERM
ENTRYPOINT ["draftwood"]
# Refuses to start until it is told who may call: --auth-file, --jwt-jwks, or --auth open.
CMD ["serve", "--host", "0.0.0.0", "--health-port", "50052", "--metrics-port", "9464", "--log-format", "json"]
