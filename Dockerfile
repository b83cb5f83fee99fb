# The command neural-mp in a container: docker build -t neural-mp .
# Other frameworks: --build-arg EXTRAS=torch (see docs/install.md)
FROM python:3.11-slim

ARG EXTRAS=onnx
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY neural_mp ./neural_mp
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

# Caches of the user whom `docker run --user` names.
ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["neural-mp"]
