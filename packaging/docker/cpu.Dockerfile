# edgellm for the CPU. From the root of the checkout:
#   docker build -f packaging/docker/cpu.Dockerfile -t edgellm:cpu .
#   docker run --rm -p 127.0.0.1:8080:8080 -v edgellm-models:/models -e EDGELLM_SERVE_API_KEY=change-me edgellm:cpu

FROM python:3.12-slim-bookworm AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# Not for the CPU of the build machine alone: AVX2 and FMA, no AVX-512.
ENV CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_RPC=ON"
RUN python -m venv /opt/edgellm \
 && /opt/edgellm/bin/pip install --no-cache-dir '.[engine,starter]'

FROM python:3.12-slim-bookworm
# OpenMP, which the engine's threads use.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 edgellm \
 && install --directory --owner=edgellm /models
COPY --from=build /opt/edgellm /opt/edgellm
# What comes from the hub is kept in its own cache: in the volume too.
ENV PATH=/opt/edgellm/bin:$PATH EDGELLM_STORE_DIR=/models HF_HOME=/models/huggingface
USER 10001
VOLUME /models
EXPOSE 8080
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s CMD \
  ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
# Another address than 127.0.0.1 is refused without EDGELLM_SERVE_API_KEY.
ENTRYPOINT ["edgellm"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080"]
