# SPDX-License-Identifier: Apache-2.0
# The GPU environment as a container: CUDA 13 toolkit, the packages of environment.yml, JupyterLab by default.
#
# No image has been built from this file by its authors: they had no container runtime at hand. Read it as the recipe
# of environment.yml in another form.
#
#   docker build -t nwor .
#   docker run --rm --gpus all --ipc=host -p 127.0.0.1:8888:8888 nwor          (JupyterLab; its URL is printed)
#   docker run --rm -it --gpus all --ipc=host nwor bash                        (a shell; also `make shell`)

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bzip2 ca-certificates curl g++ git make \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --shell /bin/bash --uid 1001 nwor \
    && install -d -o nwor -g nwor /home/nwor/nwor
USER nwor
WORKDIR /home/nwor/nwor
ENV MAMBA_ROOT_PREFIX=/home/nwor/micromamba
ENV PATH=/home/nwor/micromamba/envs/nwor/bin:/home/nwor/bin:$PATH

ARG MICROMAMBA=2.3.2
RUN mkdir -p /home/nwor/bin \
    && curl -fsSL "https://micro.mamba.pm/api/micromamba/linux-64/${MICROMAMBA}" \
        | tar -xj -C /home/nwor bin/micromamba

# The packages first: they change less often than the kit.
COPY --chown=nwor environment.yml ./
RUN micromamba create -y -f environment.yml && micromamba clean -ay

COPY --chown=nwor . .
# Built for every architecture setup.py names: there is no GPU to ask while an image is built.
RUN pip install --no-deps --no-build-isolation -e .

EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "--notebook-dir=notebooks"]
