# Everything that training, tests and export need, for a CPU or an NVIDIA GPU (the wheels of torch bring CUDA along).
#
#   docker build -t detection-toolkit .
#   docker run --rm -v "$PWD/runs:/app/runs" detection-toolkit train detr
#   docker run --rm --gpus all --ipc host -v "$PWD:/data" -w /data detection-toolkit train detr --data.train train.json
#
# --ipc host: worker processes hand images over in shared memory, of which a container has 64 MiB otherwise.
FROM python:3.12-slim

# git: a run records the version of the code that it was made with.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git=1:2.* \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml LICENSE README.md ./
COPY toolkit toolkit
COPY scripts scripts
COPY configs configs
# Floors stand in pyproject.toml; an image is as new as the day it is built.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[onnx,video]"

RUN useradd --create-home --uid 1000 trainer && mkdir runs && chown trainer runs
USER 1000
ENTRYPOINT ["detect"]
CMD ["--help"]
