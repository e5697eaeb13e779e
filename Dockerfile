# The orchestrator in a container: base dependencies only, no torch, no vLLM, no compiler; not root. Its peers are elsewhere.
#
#   docker build -t counterpoint .
#   docker run -v /data/jobs:/data -v /etc/counterpoint:/etc/counterpoint:ro counterpoint
#
# See docs/operations.md for the mounts and the key files.

FROM python:3.11-slim AS build
WORKDIR /src
COPY requirements/cpu.lock requirements/
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY cluster cluster
COPY environments environments
COPY inference inference
COPY job job
COPY models models
COPY orchestrator orchestrator
COPY perf perf
COPY run run
COPY serve serve
COPY sweep sweep
COPY trainer trainer
COPY transport transport
COPY tune tune
# The lock as constraints: the versions are those that were tested, but only what the base needs is installed.
RUN python -m venv /opt/counterpoint \
    && /opt/counterpoint/bin/pip install --no-cache-dir --constraint requirements/cpu.lock .

FROM python:3.11-slim
RUN groupadd --gid 10001 counterpoint \
    && useradd --uid 10001 --gid counterpoint --no-create-home --home-dir /data --shell /usr/sbin/nologin counterpoint \
    && install --directory --owner counterpoint --group counterpoint /data
COPY --from=build /opt/counterpoint /opt/counterpoint
ENV PATH=/opt/counterpoint/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER counterpoint
WORKDIR /data
VOLUME /data
# The process is PID 1: it handles SIGTERM itself, by draining, and its only children are its own.
STOPSIGNAL SIGTERM
ENTRYPOINT ["counterpoint"]
CMD ["orchestrator", "/etc/counterpoint/run.toml", "--resume"]
