# Images of Pixelis: `docker build --target cpu -t pixelis:cpu .` or `docker build --target cuda -t pixelis:cuda .`
# The wheels bring CUDA's libraries, so that the CUDA image needs nothing from the host but the driver (NVIDIA container toolkit).
FROM python:3.11-slim-bookworm AS base
# make installs, gcc and g++ compile Triton's kernels at run time, wget and curl answer KubeRay's probes, rsync and ssh serve `ray up`.
RUN apt-get update && apt-get install -y --no-install-recommends make gcc g++ wget curl rsync openssh-client && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 --shell /bin/bash ray
WORKDIR /opt/pixelis
RUN chown ray /opt/pixelis
# Ray runs the commands of `ray up` in login shells, which set PATH anew.
RUN echo 'export PATH=/opt/pixelis/.venv/bin:$PATH' > /etc/profile.d/pixelis.sh
USER ray
COPY --chown=ray . .
ENV PATH=/opt/pixelis/.venv/bin:$PATH PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0

FROM base AS cpu
# PyPI's torch brings CUDA, several GiB that nothing here uses.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN make install

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility DS_ACCELERATOR=cuda
RUN make install-gpu
