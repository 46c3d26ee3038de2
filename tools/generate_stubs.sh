#!/usr/bin/env bash
# Generates the Python stubs of protos/draftwood into the folder given (default: protos, where they are committed).
# Its compiler is older than the runtime on purpose: generated code runs on its own protobuf version and newer ones only.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-protos}
venv=.venv-protos
if [ ! -x "$venv/bin/protoc-gen-mypy_grpc" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check grpcio-tools==1.76.0 mypy-protobuf==5.1.0 setuptools==80.9.0
fi
mkdir -p "$out"
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc --proto_path=protos \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" --mypy_grpc_out="$out" \
  protos/draftwood/v1/*.proto protos/draftwood/admin/v1/*.proto
