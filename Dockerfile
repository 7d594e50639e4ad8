# An image of this checkout: core and the plugins of this repository. Podman and Docker both build it.
#
#   docker build -t spurline .                              for CPUs
#   docker build -t spurline --build-arg VARIANT=cuda .     for NVIDIA GPUs; run it with --gpus all
#
#   docker run --rm -v "$PWD:/runs" spurline train run.yaml
#
# Nothing is fetched from a model hub, neither here nor by the check at the end.
ARG PYTHON_VERSION=3.11
FROM docker.io/library/python:${PYTHON_VERSION}-slim-bookworm

ARG VARIANT=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

# Kernels for GPUs are compiled when they are first used.
RUN if [ "$VARIANT" = cuda ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi

WORKDIR /opt/spurline

# torch comes first and alone: as a dependency of something else pip would choose its own build.
COPY constraints.txt constraints-gpu.txt ./
RUN case "$VARIANT" in \
      cpu) pip install --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' constraints.txt)" ;; \
      cuda) pip install "$(grep '^torch==' constraints.txt)" ;; \
      *) echo "VARIANT is '$VARIANT'. Choose cpu or cuda." >&2; exit 1 ;; \
    esac

COPY LICENSE README.md ./
COPY core core
COPY plugins plugins
RUN pip install -c constraints.txt ./core ./plugins/text './plugins/models[lora]' ./plugins/preference './plugins/rl[math]' \
      ./plugins/concurrency ./plugins/ranks ./plugins/insight ./plugins/planning './plugins/trackers[tensorboard]' ./plugins/collation_fast \
      ./plugins/async_rl ./plugins/simulation ./plugins/environments ./plugins/agents ./plugins/fsdp_backend ./plugins/megatron_backend \
      ./plugins/distillation ./plugins/reward_models ./plugins/objectives ./plugins/evals ./plugins/curricula ./plugins/oracle ./plugins/lineage
RUN if [ "$VARIANT" = cuda ]; then pip install -c constraints.txt -c constraints-gpu.txt liger-kernel; fi

# The image must answer and plan a run without a network, or it is not finished.
COPY examples examples
RUN HF_HUB_OFFLINE=1 python examples/make_tiny_model.py models/tiny-qwen3 \
    && HF_HUB_OFFLINE=1 spurline plan examples/sft_sort.yaml \
    && spurline plugins doctor \
    && rm -rf models

RUN useradd --create-home --uid 1000 spurline && mkdir /runs && chown spurline /runs
USER spurline
WORKDIR /runs
ENTRYPOINT ["spurline"]
CMD ["--help"]
