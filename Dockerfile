# An image with `compress` and ONNX Runtime, for configs/cluster and for CI:
#
#     docker build -t compress .
#     docker run --rm -v "$PWD:/work" compress quantize-dynamic minilm -o out/int8
#
# The target `static` is an empty image with a static program, for passes over weights and parts of runs. It cannot
# load ONNX Runtime:
#
#     docker build --target static -t compress-static .
FROM rust:1.95-alpine AS build-static
RUN apk add --no-cache musl-dev
WORKDIR /src
COPY . .
RUN CARGO_INCREMENTAL=0 cargo build --release --locked --bin compress && mkdir /empty

FROM scratch AS static
COPY --from=build-static /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build-static --chmod=1777 /empty /tmp
COPY --from=build-static /src/target/release/compress /usr/local/bin/compress
ENV PATH=/usr/local/bin COMPRESS_CACHE=/tmp/compress
WORKDIR /work
ENTRYPOINT ["compress"]

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
