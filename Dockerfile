# Tandem in a container: docs/running-on-a-cluster.md.
#
#     docker build -t tandem .                        the image to run: tdrun, tdbench, libtandem and an example
#     docker build -t tandem-build --target build .   the image to compile programs in
#
# tests/containers/build_in_chroot.py runs these steps without a container engine. It knows ARG, FROM, RUN, COPY, ENV,
# WORKDIR, USER and CMD, in the forms that are used here.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential cmake ninja-build pkg-config libuv1-dev libssl-dev zlib1g-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /tandem
COPY CMakeLists.txt CMakePresets.json ./
COPY cmake cmake
COPY include include
COPY src src
COPY plugins plugins
COPY tools tools
COPY man man
RUN cmake --preset release \
    -DTANDEM_BUILD_TESTS=OFF -DTANDEM_BUILD_EXAMPLES=OFF -DTANDEM_BUILD_BENCH=OFF
RUN cmake --build --preset release \
    && cmake --install build/release --strip \
    && ldconfig
# A program of a user is compiled like this one.
COPY examples/10_ddp_tdrun.c examples/
RUN cc -O2 examples/10_ddp_tdrun.c $(pkg-config --cflags --libs tandem) -o /usr/local/bin/tandem-ddp
# What runs, without headers and manual pages.
RUN mkdir -p /image/usr/local/bin /image/usr/local/lib \
    && cp /usr/local/bin/tdrun /usr/local/bin/tdbench /usr/local/bin/tdmerge /usr/local/bin/tandem-ddp \
        /image/usr/local/bin \
    && cp -P /usr/local/lib/libtandem.so.* /image/usr/local/lib \
    && if [ -d /usr/local/lib/tandem ]; then cp -a /usr/local/lib/tandem /image/usr/local/lib; fi

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends libuv1 libssl3 zlib1g \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /image /
RUN ldconfig && useradd --uid 1000 --create-home tandem
USER tandem
WORKDIR /home/tandem
CMD ["tdrun", "doctor"]
