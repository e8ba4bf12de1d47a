# SPDX-License-Identifier: Apache-2.0
# The GPU environment as a container: Debian's Python 3.11, the packages of requirements/gpu.lock (CUDA 13's compiler is
# among them), JupyterLab by default. The host needs a driver for CUDA 13 and NVIDIA's container toolkit.
#
#   docker build -t nwor .                                                      (or `make image`)
#   docker run --rm --gpus all --ipc=host -p 127.0.0.1:8888:8888 nwor          (JupyterLab; its URL is printed)
#   docker run --rm -it --gpus all --ipc=host nwor bash                        (a shell; also `make shell`)
#
# Tried in November 2026, step by step in a root filesystem of Debian 12's packages: everything below, as this user, with all
# hashes checked; `pip check`; the build for sm_80, sm_90 and sm_100; `nwor doctor`; and that JupyterLab answers.
# Never tried: `docker build` and `docker run` themselves, the base image, and anything that needs a GPU.

FROM debian:12-slim

# g++ and Python's headers are for the extension, and for what Triton and FlashInfer compile as they run.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ARG UID=1000
RUN useradd --create-home --shell /bin/bash --uid "$UID" nwor \
    && install -d -o nwor -g nwor /home/nwor/nwor
USER nwor
WORKDIR /home/nwor/nwor
ENV VIRTUAL_ENV=/home/nwor/venv
ENV CUDA_HOME=$VIRTUAL_ENV/lib/python3.11/site-packages/nvidia/cu13
ENV PATH=$VIRTUAL_ENV/bin:$CUDA_HOME/bin:$PATH
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The packages first: they change less often than the kit. Each is checked against its hash.
COPY --chown=nwor requirements/gpu.lock requirements/
RUN python3 -m venv "$VIRTUAL_ENV" \
    && pip install --no-cache-dir --no-deps --only-binary=:all: --require-hashes -r requirements/gpu.lock \
    && ln -s lib "$CUDA_HOME/lib64"

COPY --chown=nwor . .
# Built for every chip setup.py names: there is no GPU to ask while an image is built.
RUN NWOR_CUDA=1 pip install --no-cache-dir --no-deps --no-build-isolation -e . -e ./kv_audit

EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "--notebook-dir=notebooks"]
