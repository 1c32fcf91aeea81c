# An image with `compress` and ONNX Runtime, for configs/cluster and for CI:
#
#     docker build -t compress .
#     docker run --rm -v "$PWD:/work" compress quantize-dynamic minilm -o out/int8
FROM rust:1.95-slim-trixie AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-pip
WORKDIR /src
COPY . .
RUN CARGO_INCREMENTAL=0 cargo build --release --locked --bin compress
RUN COMPRESS_CACHE=/cache target/release/compress doctor --fetch

FROM debian:trixie-slim
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /cache/onnxruntime-*/ /usr/local/lib/
COPY --from=build /src/target/release/compress /usr/local/bin/compress
# Also for other users (`docker run --user`), who have no home folder.
ENV COMPRESS_CACHE=/tmp/compress
WORKDIR /work
ENTRYPOINT ["compress"]
