#!/usr/bin/env bash
# All tests: format, lints, tests, docs. `--long` runs the random tests with their full counts.
set -euo pipefail
cd "$(dirname "$0")"

if [ "${1:-}" = "--long" ]; then
  export MESHC_CASES=20000 MESHC_GRAPHS=2000 MESHC_CHOICES=500 MESHC_STEPS=1500 MESHC_GPT_STEPS=200 MESHC_KILLS=200 \
    MESHC_PIPES=all MESHC_MUTANTS=1000 MESHC_TABLES=1000
fi
cargo fmt --all --check
cargo clippy --workspace --all-targets -- -D warnings
cargo test --workspace
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
