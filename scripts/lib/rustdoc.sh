#!/bin/sh
# rustdoc with unstable options. The variable is set for rustdoc only: build scripts detect it, so that all crates
# would be rebuilt.
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
