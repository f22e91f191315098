# edgellm for NVIDIA cards (CUDA 13: Turing and newer). From the root of the checkout:
#   docker build -f packaging/docker/cuda.Dockerfile -t edgellm:cuda .
#   docker run --rm --gpus all -p 127.0.0.1:8080:8080 -v edgellm-models:/models \
#     -e EDGELLM_SERVE_API_KEY=change-me edgellm:cuda

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# Give the number of your card alone (RTX 40: 89) and the build takes a fraction of the time.
ARG CUDA_ARCHITECTURES="75;80;86;89;90;120"
ENV CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_CUDA=ON -DGGML_RPC=ON -DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES}"
# The build machine has no driver; the libraries link against the toolkit's stub of it.
RUN ln -s libcuda.so /usr/local/cuda/lib64/stubs/libcuda.so.1 \
 && python3 -m venv /opt/edgellm \
 && LD_LIBRARY_PATH=/usr/local/cuda/lib64/stubs \
    /opt/edgellm/bin/pip install --no-cache-dir '.[engine,starter]'

FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 edgellm \
 && install --directory --owner=edgellm /models
COPY --from=build /opt/edgellm /opt/edgellm
# What comes from the hub is kept in its own cache: in the volume too.
ENV PATH=/opt/edgellm/bin:$PATH EDGELLM_STORE_DIR=/models HF_HOME=/models/huggingface
USER 10001
VOLUME /models
EXPOSE 8080
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s CMD \
  ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
# Another address than 127.0.0.1 is refused without EDGELLM_SERVE_API_KEY.
ENTRYPOINT ["edgellm"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8080"]
