# Counterpoint in a container, not root. Three targets of one file:
#
#   docker build -t counterpoint .                       the orchestrator: base dependencies, no torch, no vLLM, no compiler
#   docker build -t counterpoint:cpu --target cpu .      a whole job on a CPU: trainer, vLLM, Ray
#   docker build -t counterpoint:gpu --target gpu .      the same with CUDA
#
# docs/operations.md, "In a container", says what is mounted. `make image-test` builds the first and plays a run with it.

FROM python:3.11-slim AS sources
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY counterpoint counterpoint
COPY orchestrator orchestrator
COPY transport transport

# What the wheel needs, of the versions that were tested, each file by its hash. What `cpu` and `gpu` add comes of several builds of torch,
# so the lock binds it by version alone. First what we depend on,
# which changes seldom, so that a change of our sources builds in seconds.
FROM python:3.11-slim AS build
WORKDIR /src
COPY requirements requirements/
COPY pyproject.toml ./
RUN python -m venv /opt/counterpoint \
    && /opt/counterpoint/bin/pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/base.lock
COPY --from=sources /src ./
RUN /opt/counterpoint/bin/pip install --no-cache-dir --no-deps .

# What all targets have: the user, and what is said of the image.
FROM python:3.11-slim AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="counterpoint" \
    org.opencontainers.image.description="A self-hosted orchestrator for RL post-training of language models" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="$VERSION" \
    org.opencontainers.image.revision="$REVISION"
RUN groupadd --gid 10001 counterpoint \
    && useradd --uid 10001 --gid counterpoint --no-create-home --home-dir /data --shell /usr/sbin/nologin counterpoint \
    && install --directory --owner counterpoint --group counterpoint /data /models /etc/counterpoint-keys
ENV PATH=/opt/counterpoint/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /data
VOLUME /data
# PID 1 passes signals on to the command, which drains, and reaps what health checks leave (transport/process/first_process.py).
STOPSIGNAL SIGTERM
ENTRYPOINT ["counterpoint"]
HEALTHCHECK --interval=30s --timeout=15s --start-period=120s CMD ["counterpoint", "status", "/data", "--health"]

FROM base AS orchestrator
COPY --from=build /opt/counterpoint /opt/counterpoint
USER 10001:10001
CMD ["orchestrator", "/etc/counterpoint/run.toml", "--resume"]

# UV_FIND_LINKS and TORCH="" take torch from a folder of wheels instead of PyTorch's index of CPU builds.
FROM build AS build-cpu
ARG TORCH="--torch-backend cpu"
ARG UV_FIND_LINKS=""
RUN /opt/counterpoint/bin/pip install --no-cache-dir uv \
    && VIRTUAL_ENV=/opt/counterpoint /opt/counterpoint/bin/uv pip install --no-cache $TORCH \
        --constraint requirements/cpu.lock --overrides requirements/overrides.txt '.[cpu,ray]' \
    && (VIRTUAL_ENV=/opt/counterpoint /opt/counterpoint/bin/uv pip install --no-cache $TORCH --no-deps torchvision==0.28.0+cpu \
        || echo "torchvision 0.28.0+cpu is not here: servers of text do without it")

# vLLM and torch compile kernels when a job starts, with the compiler, and keep them in the volume for the next start: vLLM, and Triton,
# in directories of the user's home.
FROM base AS cpu
ENV TORCHINDUCTOR_CACHE_DIR=/data/.cache/torchinductor
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=build-cpu /opt/counterpoint /opt/counterpoint
USER 10001:10001
CMD ["run", "/etc/counterpoint/job.toml", "--resume"]

# The driver is the host's. The lock is of CPU builds, so only the pins of the extra hold here (docs/gpu.md).
FROM build AS build-gpu
RUN /opt/counterpoint/bin/pip install --no-cache-dir uv \
    && VIRTUAL_ENV=/opt/counterpoint /opt/counterpoint/bin/uv pip install --no-cache '.[gpu,ray]'

FROM base AS gpu
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*
COPY --from=build-gpu /opt/counterpoint /opt/counterpoint
ENV TORCHINDUCTOR_CACHE_DIR=/data/.cache/torchinductor \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
CMD ["run", "/etc/counterpoint/job.toml", "--resume"]

# The default.
FROM orchestrator
